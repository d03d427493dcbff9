"""N6: At forks, signals and exit the store does what `docs/project/internals/reliability.md` promises."""

from __future__ import annotations

from .changes import drop, never, replace

MUTATIONS = {
    "test_pickled_store_handle_and_saved_tensor_say_that_they_cannot_be": {
        "a store cannot be pickled": replace("TierStore.__reduce__", "raise TypeError(...)", "return str, ..."),
    },
    "test_dataset_that_holds_a_store_is_refused_by_spawned_workers": {
        "nor be given to a worker": replace("TierStore.__reduce__", "raise TypeError(...)", "return str, ..."),
    },
    "test_interrupt_ends_a_wait_and_the_store_stays_usable": {
        "Ctrl-C in a wait leaves the store open": drop("Guard._wait", "self._interrupted_wait = interrupt"),
    },
    "test_interrupt_where_nothing_is_half_changed_leaves_the_store_open": {
        "Ctrl-C where nothing is being changed leaves the store open": drop(
            "Guard.end_interrupted", "if not is_half_changed(...): ..."
        ),
    },
    "test_interrupt_that_closes_the_store_says_so": {
        "a change that is under way says so": drop("is_half_changed", "if is_marked and ...: ..."),
        "Ctrl-C in the midst of a change closes the store": replace(
            "Guard.end_interrupted", "not is_interrupt(interrupt) or self._lock_is_mine()", "interrupt"
        ),
    },
    "test_interrupt_as_a_wait_begins_leaves_the_store_open": {
        "Ctrl-C as a wait begins, too": drop("Guard._wait", "self._lock.acquire()"),
    },
    "test_scope_interrupted_at_any_moment_leaves_no_hooks": {
        "Ctrl-C while a scope is entered takes its hooks off": drop(
            "_leave_half_entered", "if owner_of_hooks() is scope: ..."
        ),
    },
    "test_keep_resident_interrupted_at_any_moment_leaves_the_hooks_around_it": {
        "Ctrl-C while keep_resident is entered puts back what it took": replace(
            "keep_resident.__enter__", "put_back(...)", "..."
        ),
        "Ctrl-C while keep_resident is left puts back the rest": replace(
            "keep_resident.__exit__", "put_back(self._entered.removed.pop())", "self._entered.removed.pop()"
        ),
    },
    "test_interrupt_where_a_store_dies_is_not_lost_nor_is_its_end": {
        "Ctrl-C where a store dies does not keep it alive": replace(
            "watch_over", "_dead.append", "lambda remains: _dead.append(remains)"
        ),
    },
    "test_error_that_another_thread_raises_in_the_midst_of_a_call_closes_the_store": {
        "an error that another thread raises in the midst of a change closes the store": never(
            "is_interrupt", "not is_known"
        ),
    },
    "test_stack_used_up_within_a_call_closes_the_store_or_changes_nothing": {
        "where the stack is used up in the midst of a change too": replace(
            "_is_of_system", "isinstance(error, RuntimeError) and ...", "isinstance(error, Exception)"
        ),
    },
}

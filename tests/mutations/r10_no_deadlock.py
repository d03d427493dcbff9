"""R10: No budget, however small, leads to a deadlock, and no budget is exceeded."""

from .changes import always, before, drop, never, replace

MUTATIONS = {
    "test_store_budgets.py": {
        "who waits for bytes may overdraw staging": replace(
            "Up.start_restore", "window = window or windows.staging", "if window is None: return False"
        ),
    },
    "test_list_longer_than_the_room_goes_on_into_that_of_what_was_got": {
        "prefetch does not overdraw": replace(
            "Up.start_restore",
            "window is None or (self._pages.pinned_for is not None and not self._memory.has_room_for_read(record))",
            "self._pages.pinned_for is not None and not self._memory.has_room_for_read(record)",
        ),
    },
    ("test_store_budgets.py", "test_residency_stages.py"): {
        "what was fetched ahead is dropped before a pack waits": drop("Down._try_admit", "self.drop(next_to_drop())"),
    },
    "test_residency_stages.py": {
        "whoever waits is woken by what is freed": drop("Guard.tell", "self.progress.notify_all()"),
    },
    "test_flush_ends_when_the_last_queued_write_is_cancelled[prefetch]": {
        "a flush is told when a prefetch has cancelled the last queued write": drop(
            "Jobs.withdraw_write", "self.has_progress = True"
        ),
    },
    "test_nothing_is_prefetched_while_a_pack_waits": {
        "nothing is prefetched while a pack waits": drop("Ledger.go_ahead", "books.num_packing"),
    },
    "test_every_budget_keeps_its_limits_and_the_bytes": {
        "no budget at all is enough": drop("HostWindows.admits_move", "not staging.used_bytes"),
    },
    "test_forward_and_backward_each_alone_are_held_within_both_budgets_and_one_tensor": {
        "a waiting pack holds no room": before(
            "Down.admit", "self._blocked.append(record)", "self._windows.charge(record, self._windows.staging)"
        ),
    },
    "test_budget_of_all_tensors_writes_nothing_and_of_a_byte_less_what_was_saved_first": {
        "a spill takes its staging before it starts": drop(
            "Down._queue_spill", "self._windows.charge(record, self._windows.staging)"
        ),
    },
    "test_allocate_beyond_the_slab_gives_a_mapping_of_its_own": {
        "a fragmented slab takes a one-off slot": replace(
            "Slab.allocate",
            "return Slot(...)",
            "raise MemoryError",
            inside="if start is None: ...",
        ),
    },
    ("test_store_budgets.py", "test_residency_threads.py"): {
        "the host budget is never exceeded": always("Down.stay", "self._windows.host.fits(record.nbytes)"),
    },
    "test_prefetch_goes_on_in_the_room_of_a_queued_handle_that_was_dropped": {
        "what finalizers freed lets the others go on": replace(
            "Guard.drain", "self._ledger.drain()", "self._ledger.drain() and False"
        ),
        "also where the next call is a request": never(
            "Ledger.ask_for", "has_changed", inside="if has_changed or looks_ahead:\n    ..."
        ),
    },
    "test_flush_ends_when_the_handle_of_the_last_write_has_only_begun_to_die": {
        "whoever waits is told when a write is passed over": drop("Residency.exchange", "guard.tell()"),
    },
    "test_put_goes_on_when_a_handle_has_only_begun_to_die": {
        "what is passed over leaves its room to the others": drop(
            "Ledger._begin_write", "self.withdraw(record)\nself.advance()"
        ),
    },
    "test_change_failed_on_the_loop_closes_the_store_before_the_engine_has_ended": {
        "a failed store is not taken for a full one": drop("Residency.exchange", "guard.end_failed(error)"),
    },
}

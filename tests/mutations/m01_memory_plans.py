"""M1: A planned step has the bits of the plain one or raises, and planning leaves the model as it was."""

from __future__ import annotations

from .changes import always, drop, never, replace

MUTATIONS = {
    "test_buffers_that_forward_changes": {
        "buffers that forward changes are found by their values": replace(
            "BufferValues.changed", "not torch.equal(...)", "False"
        ),
    },
    "memory_plan/test_same_bits.py::test_same_bits": {
        "a block is computed again with the buffers from before forward": drop(
            "ModuleState._attributes_for", "attributes['_buffers'][last] = value.clone()"
        ),
    },
    "test_generators_of_python_and_numpy": {
        "generators of Python and NumPy are as in forward": drop("_Again.__enter__", "self._generators.restore()"),
    },
    "test_what_was_exchanged_is_put_back": {
        "what was exchanged in a block since forward is put back": drop(
            "ModuleState.restored", "object.__setattr__(member.module, '__dict__', self._attributes_for(member))"
        ),
        "what needed a gradient in forward needs it again": drop(
            "ModuleState.restored", "parameter.requires_grad_(flag)"
        ),
    },
    "test_what_was_exchanged_is_the_modules_own_again_after_backward": {
        "after backward a block has what was exchanged": drop(
            "ModuleState.restored", "undo.callback(object.__setattr__, member.module, '__dict__', vars(member.module))"
        ),
    },
    "test_what_forward_sets_and_draws_is_done_once": {
        "generators that a block holds are as in forward": drop("ModuleState.restored", "generator.restore()"),
    },
    "test_block_that_cannot_be_computed_again_as_it_was_is_not": {
        "a block in another mode than planned is not computed again": never(
            "PlannedCalls._as_before", "state.evaluates != tuple(self._traits.evaluates)"
        ),
    },
    "test_backwards_on_two_threads_leave_the_buffers_the_modules_own": {
        "one thread at a time computes with a block": drop(
            "_Again.__enter__", "undo.enter_context(_lock_of(self._module))"
        ),
    },
    "test_what_was_changed_in_place_is_refused": {
        "a block that was changed since forward is refused": drop("_Again.__enter__", "self._state.check()"),
    },
    "test_random_operators_are_never_held": {
        "random operators are never held": replace(
            "_Operators.__torch_dispatch__", "torch.Tag.nondeterministic_seeded in func.tags", "False"
        ),
    },
    "test_block_that_cannot_be_repeated_is_found": {
        "a block that gives other bits is found": replace(
            "BlockRecorder._differs", "second.checksums_with(result) == checksums", "True"
        ),
    },
    "test_what_was_recorded_can_still_be_stored": {
        "what planning looks at can still be stored": replace(
            "recording:_checksum", "xxhash.xxh3_64_intdigest(memory)", "xxhash.xxh3_64_intdigest(content.numpy().data)"
        ),
    },
    "test_operators_counted_as_a_checkpoint_counts_them": {
        "operators of planning itself are not counted": never("_Operators.__torch_dispatch__", "self._saved.is_noting"),
    },
    "test_block_too_large_to_be_computed_again_is_not_even_tried": {
        "a block that would need more than the limit is not computed again": never(
            "_refuse_large",
            "seen_bytes + more_bytes[name] > limit_bytes and not any(call.communicates for call in several)",
        ),
    },
    "test_block_too_large_to_be_computed_again_is_tried_if_it_communicates": {
        "ranks whose blocks communicate do the same": drop(
            "_refuse_large", "not any(call.communicates for call in several)"
        ),
    },
    "test_trial_of_a_decision_goes_on_while_its_peak_still_rises": {
        "a trial ends when its peak has settled": never("Trials._take", "_still_rises(steps)"),
    },
    "test_where_steps_take_what_was_expected_prices_overrule_no_trial[1.0-keep]": {
        "a trial tells more than prices": always("StepWatch._correct", "is_slow", inside="is_gain = ..."),
    },
    "test_where_memory_is_returned_other_actions_change_no_peak": {
        "where memory is short, the limit says what is resident": replace(
            "StepWatch._correct", "0 if is_short else ...", "again.peak_bytes - decision.peak_bytes"
        ),
    },
    "test_what_ends_the_thread_is_in_stats_and_told_once_at_the_end_of_a_scope": {
        "no limit is set that nobody keeps": always("Returner.limit", "self._failure is None"),
    },
    "test_block_that_differs_is_kept_or_stored": {
        "a block that differs is not computed again": replace(
            "options_of", "any(call.differs for call in calls) or not calls", "not calls"
        ),
    },
    "test_step_leaves_everything_as_found": {
        "planning puts the gradients back": drop("_Gradients.put_back", "leaf.grad = gradient"),
        "planning puts the generators of the host back": drop("Steps._left_as_found", "generators.restore()"),
        "planning puts buffers and modes back": drop("Steps._left_as_found", "restore()"),
    },
    "test_leaves_outside_of_the_model_keep_their_gradients": {
        "planning puts the gradients of all leaves back": drop("Steps.take", "gradients.take(_leaves_of(loss))"),
    },
    "test_timeline_leaves_no_hooks_on_what_a_block_returns": {
        "planning leaves no hooks on tensors": drop("StepTimeline.__exit__", "hook.remove()"),
    },
    "test_copy_computes_plainly_once_the_plan_is_removed": {
        "copies of a model follow a plan no longer than the model": drop("MemoryPlan._end", "around.end()"),
    },
    "test_block_under_another_name_is_undone": {
        "a plan is taken away from all that it was applied to": drop(
            "MemoryPlan._put_around", "self._touched.append(weakref.ref(module))"
        ),
    },
    "test_decision_that_leaves_room_is_kept_to_where_steps_near_the_limit_are_slower": {
        "it is decided again for the share of the limit that was chosen": drop(
            "choice:choose", "corrected.keep_within(best.share)"
        ),
    },
    "test_heaps_are_filled_by_small_pages_only_while_there_is_a_limit": {
        "near a plan's limit there are small pages": replace("Returner._return", "not _limited", "True"),
    },
    "test_allocator_keeps_what_is_freed_only_while_a_store_has_a_limit": {
        "a heap keeps its free end only while a plan limits the process": drop("Returner._run", "self.limit(None)"),
    },
    "test_allocator_keeps_what_is_freed_only_while_a_store_returns_what_is_short[always]": {
        "where all is returned that is free, a heap keeps nothing": always(
            "Returner._tell_allocator", "self._mode == 'auto'"
        ),
    },
    "test_allocator_keeps_what_is_freed_only_while_a_store_returns_what_is_short[auto]": {
        "a heap keeps its free end only while a store is in use": drop("Returner._run", "self._tell_allocator()"),
    },
    "test_what_returning_memory_took_is_no_price_in_the_end": {
        "what returning memory takes is no price of a block": never("choice:choose", "here and here[-1].is_short"),
    },
    "test_where_a_mixture_is_slower_than_predicted_one_way_alone_is_followed": {
        "nothing is recomputed in a decision that does without": replace(
            "_options_without", "action.kind != kind", "True"
        ),
    },
    "test_nothing_is_decided_without_what_a_block_needs": {
        "nothing is stored in a decision that does without": replace(
            "_options_without", "not action.uses_store", "True"
        ),
    },
    "test_all_is_kept_only_if_that_leaves_a_margin": {
        "a trial that keeps everything leaves a margin": replace(
            "choice:choose", "_margin(max(_MARGINS), limit_bytes)", "0"
        ),
    },
    "test_one_way_alone_is_not_tried_if_it_is_predicted_to_be_much_slower": {
        "what is predicted to be much slower is not tried": never(
            "choice:choose", "trial.without and _is_hopeless(decision, here)"
        ),
    },
    "test_choice_known_before_the_trials_is_measured_again": {
        "a choice is measured as the trials left the heaps": replace("choice:choose", "outdated=known", "outdated=[]"),
    },
    "test_choices_whose_trials_tell_little_apart_take_turns": {
        "the steps of the same turn are compared": replace(
            "_fastest_first", "turn[place].seconds / sum(step.seconds for step in turn)", "-place"
        ),
        "of equal choices, memory is not short in the first": replace(
            "_fastest_first", "rivals[place].is_short", "False"
        ),
    },
    "test_choice_whose_steps_by_turns_exceed_the_limit_is_not_taken": {
        "a peak by turns counts, too": always("_fastest", "rivals[place].measured.peak_bytes <= limit_bytes"),
    },
    "test_the_fastest_choice_within_every_limit": {
        "a storage that several blocks keep counts once": replace(
            "_shared_storages", "len(names) > 1", "len(names) > 99"
        ),
    },
    "test_of_several_plans_the_least_limits_hold_until_they_end": {
        "of several plans the least limits hold": replace(
            "PlansOfStore._least_limits", "min(..., default=None)", "max(..., default=None)"
        ),
    },
    "test_where_memory_is_short_no_trial_is_for_the_whole_limit": {
        "where memory is short, no decision for the whole limit is tried": replace(
            "_is_worth_a_trial", "not before[-1].is_short or all(...)", "True"
        ),
    },
    "test_the_whole_limit_is_used_if_less_does_not_do": {
        "the whole limit is used if less does not do": replace(
            "_is_worth_a_trial", "not before or share == _MOST", "share != _WHOLE"
        ),
    },
    "test_window_is_narrowed_only_if_nothing_else_fits": {
        "the store moves less at a time only if nothing else fits": replace(
            "Corrected.decide", "ways.append(...)", "ways.insert(0, (min(_MARGINS), True))"
        ),
        "the store moves less at a time if nothing else fits": drop(
            "Corrected.decide", "ways.append((min(_MARGINS), True))"
        ),
    },
    "test_within_the_tightest_limits_the_store_moves_less_at_a_time": {
        "a plan narrows the window of the store": replace("MemoryPlan.apply", "(0, self.staging_bytes)", "(0, None)"),
    },
    "test_peak_above_the_limit_other_actions_and_the_same_bits": {
        "a plan that is decided again narrows the window of the store": replace(
            "StepWatch._correct", "again.staging_bytes", "None"
        ),
    },
    "test_store_moves_no_more_at_a_time_than_its_plans_allow": {
        "the window of a store can be narrowed": replace("HostWindows.limit", "staging_bytes", "2**26"),
    },
    "test_store_after_its_plan_died_holds_what_it_was_opened_for": {
        "a plan that has died limits nothing": never("_Wishes.are_over", "self.plan() is None"),
    },
    "test_step_with_other_calls_is_not_compared": {
        "a step that calls the model more often is not compared": always(
            "StepWatch._begin", "now.num_calls == self._expected.num_calls"
        ),
    },
    "test_no_hooks_stay_on_what_a_model_returns": {
        "no hooks stay on what a model returns": drop("StepWatch._drop", "now.stop()"),
    },
    "test_training_that_waited_for_the_store_stores_less": {
        "the store is blamed for what the training waited for": never(
            "Corrected.learn_step",
            "decision.stored_bytes and 0 < measured.seconds - expected_seconds <= 2 * waited_seconds",
        ),
    },
    "test_machine_that_is_slower_or_faster_changes_no_decision": {
        "a slower machine is not the store's fault": replace(
            "Corrected.learn_step", "2 * waited_seconds", "99 * waited_seconds"
        ),
    },
    "test_each_action_around_sharded_blocks_has_the_same_bits": {
        "parameters that FSDP frees do not count as saved": never("_Collected.note", "stays_alive(...)"),
    },
    "test_ranks_whose_blocks_communicate_do_the_same": {
        "ranks whose blocks communicate agree": drop("plan_memory:_choose", "decision = agreed(corrected, decision)"),
    },
    "test_a_block_that_differs_in_one_rank_is_computed_again_in_none": {
        "ranks tell each other which blocks differ": never("measure_prices", "communicates and are_several()"),
    },
}

UNSHOWN = {
    "a plan decides again when its prediction has missed": "it depends on times; the benchmark memory_plan shows it",
}

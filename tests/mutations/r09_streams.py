"""R9: Every stream waits for what it reads or overwrites, and copies hold no more device memory than they may."""

from __future__ import annotations

from .changes import after, always, drop, never, replace

MUTATIONS = {
    "test_reload_is_seen_by_every_later_kernel": {
        "the stream that asks waits for the reload": drop(
            "DeviceRules.hand_over", "self._memory.wait_where_asked(record, stream, reload.end)"
        ),
    },
    "test_happens_before.py": {
        "every stream that asks waits for the reload, not only the first": replace(
            "DeviceRules.hand_over", "stream in reload.streams", "reload.streams"
        ),
        "a block that another stream was made to read is not given away before that has read it": never(
            "_Streams.wait_where_asked", "stream != record.stream"
        ),
        "a block is not given away before every stream that may use it is through with it": drop(
            "_Streams.share", "self._copies.share(memory, stream)"
        ),
        "what is reloaded and not asked for holds its block until it is copied": never(
            "DeviceRules.unload", "reload.memory is not None"
        ),
        "a copy in that is given up for room is over before its block is used again": drop(
            "DeviceRules.make_room", "self._memory.wait_where_packed(reload.record, reload.end)"
        ),
        "a copy in that nobody waited for yet keeps its target": replace(
            "_Reload.__init__", "copy.memory", "copy.memory[:0].clone()"
        ),
        "the copy stream waits for what packed": drop(
            "AcceleratorCopies.copy_out", "copying.wait_event(stream.record_event())"
        ),
        "the copy stream waits for an event after the allocation": replace(
            "AcceleratorCopies.copy_in",
            """
            with stream:
                ...
                allocated = stream.record_event()
            """,
            """
            allocated = stream.record_event()
            with self._stream(device, "in"): ...
            """,
        ),
        "the copy stream waits for the allocation at all": drop(
            "AcceleratorCopies.copy_in", "copying.wait_event(allocated)"
        ),
        "a copy's end is told of on the stream that copies": replace(
            "AcceleratorCopies.copy_out", "copying.record_event", "stream.record_event"
        ),
    },
    "test_pinning_pages_are_neither_given_back_nor_moved_meanwhile": {
        "pages of which the driver is being told stay where they are": drop(
            "Slab.begin_to_pin", "self._pinned_for = device"
        ),
    },
    "test_thread_of_the_stores_stays_on_the_device_that_it_touches": {
        "a thread of the store's own stays on the device that it touches": drop(
            "_stay_on", "torch.accelerator.set_device_index(device.index)"
        ),
    },
    "test_device_full_while_copying_ahead_backward_goes_on_without": {
        "a device that has no room for what is copied ahead does not end backward": replace(
            "Up.reload_ahead", "self._reload(record, ahead)", "self._reload(record, ahead, must=True)"
        ),
    },
    "test_offload_copies_what_the_kernel_wrote_and_then_lets_go": {
        "what copies have finished with is noticed": drop("DeviceRules.is_busy", "self._flights"),
    },
    "test_device_full_nothing_is_copied_ahead_for_the_rest_of_that_backward": {
        "a device that has no room is not asked for any again in that backward": drop(
            "Up.reload_ahead", "ahead.give_up()"
        ),
    },
    "test_device_full_what_is_asked_for_takes_the_place_of_what_was_copied_back": {
        "a copy back for which there is no room is not taken for one": replace(
            "DeviceRules.reload", "return False", "return True"
        ),
        "what is asked for on a full device takes the place of what was copied back": drop(
            "Up.reload_demanded", "self.device.make_room()"
        ),
    },
    "test_simulated_accelerator.py": {
        "a tensor comes back at the address that it had, modulo the allocator's blocks": drop(
            "_cut_span", "first -= first % _BLOCK_BYTES"
        ),
    },
    "test_close_while_copies_run_unpins_the_slab_when_they_are_over": {
        "the slab is unpinned when every copy is over": drop("Serving.engine_ended", "marker.synchronize()"),
    },
    "test_device_lost_next_call_raises_and_close_returns": {
        "a lost device does not keep a store from closing": drop("Rules.end_all", "self.device.stop_asking()"),
    },
    "test_reload_ahead_no_stream_waits_before_somebody_asks": {
        "of what is reloaded ahead no stream waits before somebody asks for it": after(
            "DeviceRules.reload", "self._num_ahead += 1", "self.hand_over(record)"
        ),
        "a stream waits for a copy back once": drop("DeviceRules.hand_over", "reload.streams.append(stream)"),
    },
    "test_offload_released_meanwhile_holds_the_memory_until_copied": {
        "a slot is not used again before the copy from it is over": always(
            "DeviceRules.when_copied", "self._may_ask and end.query()"
        ),
        "device memory is held until it is copied": replace(
            "_Streams.copy_out", "CopyOut(memory, ...)", "CopyOut(memory[:0].clone(), ...)"
        ),
        "a finalizer parks what is being copied": after(
            "DeviceRules.release",
            "self.unload(record)",
            "self._flights = deque(flight for flight in self._flights if flight.record is not record)",
        ),
    },
    "test_spill_waits_for_the_copy_that_fills_its_slot": {
        "a write waits for the copy into its slot": never("Engine._spill_lane", "spill.ready is not None"),
    },
    "test_reload_waits_for_the_copy_out_that_still_runs": {
        "a reload waits for the copy that fills its slot": replace(
            "_Streams.copy_back", "record.ready", "None", inside="self._copies.copy_in(...)"
        ),
    },
    "test_reload_on_another_stream_than_the_records_waits_there_too": {
        "the stream at pack is kept with the record; a reload's target is allocated under it": replace(
            "_Streams.copy_back", "record.stream", "self._copies.current_stream(_device_of(record))"
        ),
    },
    "test_offload_on_another_stream_than_the_records_follows_the_records": {
        "a copy out waits for the stream that packed": replace(
            "_Streams.copy_out", "record.stream", "self._copies.current_stream(_device_of(record))"
        ),
    },
    "test_offload_beyond_the_bound_makes_the_stream_wait_not_the_host": {
        "memory in flight is let go of only behind a wait of its stream": drop(
            "DeviceRules._land_early", "self._memory.wait_where_packed(flight.record, flight.copy.end)"
        ),
    },
    "test_offload_room_that_device_bytes_leave_is_lent_to_copies_until_it_is_needed": {
        "what was lent of device_bytes comes back when it is needed": drop("DeviceRules.hold", "self._bound_flight()"),
    },
    "test_reload_ahead_room_that_copies_out_have_is_not_given_twice": {
        "what is on its way out and back does not get the same room twice": replace(
            "DeviceWindow.fits_reload", "lent + _lent(self.in_flight)", "lent"
        ),
    },
    "test_staying_bytes_never_more_than_the_device_has_to_spare": {
        "what is found to stay on a device is no more than it has to spare": replace(
            "Coverage._learn", "uncovered if spare is None else ...", "uncovered"
        ),
    },
    "test_auto_another_graph_nothing_stays_until_it_is_known": {
        "of a graph that is not known nothing stays on a device whose share is found": replace(
            "PackLog._keep_uncovered",
            "self.residency.keep_on_device(0 if plan is None else ...)",
            "plan and self.residency.keep_on_device(...)",
        ),
    },
    "test_room_of_device_bytes_is_lent_once": {
        "what copies back were lent is taken from what stays": replace(
            "DeviceWindow.surplus", "_lent(self.reloaded)", "0"
        ),
        "what copies back were lent is not lent to copies out": replace(
            "DeviceWindow.flies_too_much", "lent + _lent(self.reloaded)", "lent"
        ),
        "what copies out were lent is not lent to copies back": replace(
            "DeviceWindow.reloads_too_much", "lent + _lent(self.in_flight)", "lent"
        ),
        "where too much stays, copies out keep the room of their own": drop("DeviceWindow.flies_too_much", "lent > 0"),
        "and copies back": drop("DeviceWindow.reloads_too_much", "lent > 0"),
        "and those that are still to be queued": drop("DeviceWindow.fits_reload", "not lent"),
        "what is to come back counts before it does": drop("DeviceWindow.fits_reload", "nbytes", inside="_lent(...)"),
        "only room in which nothing stays is lent": replace(
            "DeviceWindow._room", "... - self.resident.used_bytes", "..."
        ),
    },
    "test_surplus_is_what_was_saved_first_until_the_rest_may_stay": {
        "what was saved first leaves a device first": replace(
            "DeviceWindow.surplus", "iter(self._resident.values())", "reversed(self._resident.values())"
        ),
    },
    "test_surplus_what_the_plan_sends_away_goes_first_and_once": {
        "what has left a device is not chosen again": drop("DeviceWindow.leave", "self._leaving.pop(record.key, None)"),
        "what the plan does not send away any more stays": always(
            "DeviceWindow.surplus", "record.place in (Place.HOST, Place.DISK)"
        ),
    },
    "test_reload_ahead_one_that_is_larger_than_the_bound_while_another_is_in_use": {
        "what is in use and the next are back whatever their size": replace(
            "DeviceRules.reload", "len(self._reloaded) > 2", "len(self._reloaded) > 1"
        ),
        "one may come back ahead whatever its size": replace(
            "DeviceRules.has_room_to_reload", "num_needed <= 1", "False"
        ),
        "only one may": never("DeviceRules.has_room_to_reload", "self._num_ahead"),
        "what is asked for is not ahead any more": drop("DeviceRules._note_awaited", "self._num_ahead -= ..."),
        "nor is what is forgotten": drop("DeviceRules.unload", "self._num_ahead -= 1"),
    },
    "test_offload_one_that_is_larger_than_the_bound_is_waited_for_when_the_next_leaves": {
        "one copy out may be larger than its window": replace(
            "DeviceRules._bound_flight", "len(self._flights) > 1", "len(self._flights) > 0"
        ),
    },
    "test_device_is_left_by_all_that_has_to_as_room_is_freed": {
        "what was blocked lets others leave the device": drop("Down.admit_blocked", "self._offload_surplus()"),
    },
    "test_copies_back_ahead_begin_while_the_copy_out_still_runs": {
        "what is being copied out can come back": drop("_IN_HOST_MEMORY", "State.OFFLOADING"),
    },
    "test_copies_back_ahead_pass_over_what_the_graph_has_let_go_of": {
        "what nobody needs is not copied back": drop("Up.reload_ahead", "record.is_alive"),
    },
    "test_copies_back_ahead_go_on_from_what_was_asked_for": {
        "copies back go on from what was asked for": drop("Rules.hand_over", "reload_ahead.asked_for(index)"),
    },
    "test_decisions_random_steps_on_an_accelerator_are_those_of_the_store": {
        "what leaves host memory is counted on the device no longer": drop("Down._drop", "self.device.unload(record)"),
    },
    "test_known_graph_a_storage_that_is_asked_for_twice_comes_back_once": {
        "a copy ahead does not take the place of what is needed before it": replace(
            "Up.reload_ahead",
            "self.device.has_room_to_reload(record.nbytes, ahead.needs_first)",
            "self.device.has_room_to_reload(record.nbytes)",
        ),
    },
    "test_reload_beyond_its_bound_forgets_what_backward_needs_last": {
        "what is needed last is forgotten first": replace(
            "DeviceRules.reload", "oldest[0] if next_rank is None else max(...)", "oldest[0]"
        ),
    },
    "test_reload_ahead_what_was_handed_over_last_stays_even_if_the_order_does_not_know_it": {
        "what was handed over last is not forgotten": drop("DeviceRules.reload", "other.key != self._asked_last"),
        "nor counted as room": replace("DeviceRules.has_room_to_reload", "record.key == self._asked_last", "False"),
    },
    "test_measured_what_the_host_takes_to_queue_a_wait_is_not_waited_for": {
        "a host that is slow is not taken for a link that is": replace(
            "GraphTimes.measured",
            "between(each.before, each.after) - each.queueing_seconds",
            "between(each.before, each.after)",
        ),
    },
    "test_reload_ahead_does_not_take_the_place_of_what_was_asked_for_last": {
        "what is asked for is the last to be forgotten": drop(
            "DeviceRules.hand_over", "self._reloaded.move_to_end(record.key)"
        ),
    },
    "test_uncovered_bytes_are_the_share_of_the_link_that_was_waited_for": {
        "what covers less, forward or backward, decides what stays": replace(
            "Measured.uncovered_bytes", "max(...)", "min(...)"
        ),
    },
    "test_measured_is_what_was_waited_for_and_copied_in_forward_and_in_backward": {
        "forward ends with the first that backward asks for": replace(
            "GraphTimes.asked_for", "if self._turned is None: ...", "..."
        ),
        "the last wait is in backward's time": drop("GraphTimes.waits", "self._ended = after"),
        "waits of backward are backward's": replace(
            "GraphTimes.waits", "self._turned is not None", "False", inside="self._waits[...]"
        ),
        "what leaves in backward is not forward's": replace(
            "GraphTimes.copies_out", "if self._turned is None: ...", "..."
        ),
        "what comes back in forward is not backward's": replace(
            "GraphTimes.copies_in", "if self._turned is not None: ...", "..."
        ),
    },
    "test_times_are_over_when_the_last_mark_is": {
        "a device is asked for times when it has come to the last mark": drop("GraphTimes._marks", "self._ended"),
    },
    "test_staying_bytes_coming_that_is_looked_at_late_takes_nothing_back": {
        "a coming that is read late takes nothing back": replace(
            "Coverage._learn", "max(self._staying.get(...), ...)", "times.staying_bytes + more"
        ),
    },
    "test_staying_bytes_of_ever_new_graphs_those_of_the_latest_are_known": {
        "of ever new graphs few are remembered": never("Coverage._learn", "len(self._staying) > _MAX_GRAPHS"),
    },
    "test_auto_host_that_is_ahead_of_its_device_finds_it_from_an_earlier_step": {
        "the times of a graph end with it": drop("Coverage.note", "times.end()"),
    },
    (
        "test_auto_graph_that_another_came_into_tells_nothing",
        "test_auto_graph_in_whose_backward_another_began_tells_nothing",
    ): {
        "who sets what stays ends the times of another graph": drop(
            "_Streams.spoil_times", "if (times := self._open_times()) is not None: ..."
        ),
        "such times tell nothing": replace(
            "GraphTimes.spoil", "self._is_whole = self.is_open = ...", "self.is_open = ..."
        ),
    },
    "test_auto_finds_what_compute_covers": {
        "what leaves in forward is told to who takes its times": drop(
            "_Streams.copy_out", "times.copies_out(end - first)"
        ),
        "what was found is the whole graph's": replace(
            "PackLog._keep_uncovered", "plan.trace.signatures[-1]", "plan.trace.signatures[0]"
        ),
    },
    "test_auto_link_that_is_slow_on_the_way_back_finds_what_backward_covers": {
        "what comes back, too": drop("_Streams.copy_back", "times.copies_in(record.nbytes)"),
    },
}

"""R9: Every stream waits for what it reads or overwrites, and copies hold no more device memory than they may."""

from .changes import after, always, drop, never, replace

MUTATIONS = {
    "test_happens_before.py": {
        "the stream that asks waits for the reload": drop(
            "DeviceRules.hand_over", "self._memory.wait_where_asked(record, stream, reload.end)"
        ),
        "a slot is not used again before the copy from it is over": always(
            "DeviceRules.when_copied", "self._may_ask and not self.busy and end.query()"
        ),
        "device memory is held until it is copied": replace(
            "Streams.copy_out", "CopyOut(memory, ...)", "CopyOut([], ...)"
        ),
        "a finalizer parks what is being copied": after(
            "DeviceRules.remove",
            "self.unload(record)",
            "self.flights = deque(flight for flight in self.flights if flight.record is not record)",
        ),
        "the stream at pack is kept with the record; a reload's target is allocated under it": replace(
            "Streams.copy_back", "record.stream", "self._copies.current_stream(_device_of(record))"
        ),
        "a copy out waits for the stream that packed": replace(
            "Streams.copy_out", "record.stream", "self._copies.current_stream(_device_of(record))"
        ),
        "every stream that asks waits for the reload, not only the first": replace(
            "DeviceRules.hand_over", "stream in reload.streams", "reload.streams"
        ),
        "a block that another stream was made to read is not given away before that has read it": never(
            "Streams.wait_where_asked", "stream != record.stream"
        ),
        "a block is not given away before every stream that may use it is through with it": drop(
            "Streams.share", "self._copies.share(copy.memory, stream)"
        ),
        "what is reloaded and not asked for holds its block until it is copied": never(
            "DeviceRules.unload", "reload.memory is not None"
        ),
        "a copy in that is given up for room is over before its block is used again": drop(
            "DeviceRules.make_room", "self._memory.wait_where_packed(reload.record, reload.end)"
        ),
        "a copy in that nobody waited for yet keeps its target": replace(
            "_Reload.__init__", "copy.memory", "copy.memory[:0]"
        ),
        "the copy stream waits for what packed": drop(
            "AcceleratorCopies.copy_out_many", "copying.wait_event(self._fence(stream, device))"
        ),
        "the copy stream waits for an event after the allocation": replace(
            "AcceleratorCopies.copy_in_many",
            """
            with stream:
                ...
                allocated = self._fence(stream, device)
            """,
            """
            allocated = self._fence(stream, device)
            with self._stream(device, "in"): ...
            """,
        ),
        "the copy stream waits for the allocation at all": drop(
            "AcceleratorCopies.copy_in_many", "copying.wait_event(allocated)"
        ),
    },
    "test_copied_from_the_stream_that_packed_and_kept_for_the_one_that_unpacked": {
        "the stream that gets a tracked tensor is known": drop(
            "PackLog.pass_by", "self.residency.handing_out.asked_on(device)"
        ),
        "what was tracked is copied from the stream that packed it": replace(
            "HandleFactory.of_tracked", "tracked.stream", "'another'"
        ),
    },
    "test_stream_changed_between_packs_each_is_copied_from_its_own": {
        "a pack goes by no grant that was given to packs on another stream": replace(
            "OffloadScope.pack", "grant.device != device or grant.stream != stream", "grant.device != device"
        ),
    },
    "test_tensors_in_host_memory_beside_those_of_a_device_stay_there": {
        "nor for another device": replace(
            "OffloadScope.pack", "grant.device != device or grant.stream != stream", "grant.stream != stream"
        ),
    },
    "test_point_that_is_over_tells_of_those_before_it_in_its_stream_alone": {
        "a copy that is over tells of none that comes after it": replace(
            "_Point._is_over", "max(self._way.num_over, self._number)", "self._way.num_points"
        ),
    },
    "test_event_is_used_again_when_nobody_needs_it_and_not_before": {
        "an event is recorded anew only when nobody needs what it was": replace(
            "AcceleratorCopies._end",
            "return _Point(event, device, self._ways[device, direction], free.append)",
            "free.append(event); return _Point(event, device, self._ways[device, direction])",
        ),
    },
    "test_shortage_of_one_graph_registers_others_too": {
        "where a device is short of room, what is tracked is registered": drop(
            "Saving.find_room_to_track", "self._registration.register_on_device(self._ledger.device_grouping())"
        ),
    },
    "test_each_leaves_alone_where_no_group_can_be_made": {
        "a group is gathered on the stream that packed its members": never(
            "Streams.gather", "self._copies.current_stream(device) != stream or is_capturing(device)"
        ),
    },
    "test_memory_of_members_is_kept_for_every_stream_that_may_use_it": {
        "the blocks of a group's members are not given away before every stream is through with them": drop(
            "Streams.gather", "self._copies.share(parts, known)"
        ),
    },
    "test_blocks_of_a_batch_are_kept_for_every_stream_that_may_use_them": {
        "no block of a batch is given away before every stream is through with it": replace(
            "Streams.share", "copy.memory", "copy.memory[:1]"
        ),
        "no block of a batch that came back is given away before who asked is through with it": replace(
            "Streams.wait_where_asked", "handle.parts.values() or (handle.source,)", "(handle.source,)"
        ),
    },
    "test_dropped_graph_gives_the_room_back": {
        "the room of what was tracked is given back": drop(
            "TrackedTensors.drop_ended", "self.on_device.end(remains, is_gone=True)"
        ),
    },
    "test_pinning_pages_are_neither_given_back_nor_moved_meanwhile": {
        "pages of which the driver is being told stay where they are": drop(
            "Slab.begin_to_pin", "self.pinned_for = device"
        ),
    },
    "test_device_full_nothing_is_copied_ahead_for_the_rest_of_that_backward": {
        "a device that has no room for what is copied ahead does not end backward": replace(
            "Up.reload_ahead", "self._reload(record, ahead)", "self._reload(record, ahead, must=True)"
        ),
    },
    "test_device_full_what_is_asked_for_takes_the_place_of_what_was_copied_back": {
        "what is asked for on a full device takes the place of what was copied back": drop(
            "Up.reload_demanded", "self._device.make_room()"
        ),
    },
    "test_device_lost_next_call_raises_and_close_frees": {
        "a lost device does not keep a store from closing": drop("Ledger.end_all", "self.device.stop_asking()"),
    },
    "test_spill_waits_for_the_copy_that_fills_its_slot": {
        "a write waits for the copy into its slot": drop(
            "Worker._write_when_ready", "await self._loop.run_in_executor(self._executor, ready.synchronize)"
        ),
    },
    "test_reload_waits_for_the_copy_out_that_still_runs": {
        "a reload waits for the copy that fills its slot": replace(
            "Streams.copy_back", "record.ready", "None", inside="self._copies.copy_in_many(...)"
        ),
    },
    "test_offload_beyond_the_bound_makes_the_stream_wait_not_the_host": {
        "memory in flight is let go of only behind a wait of its stream": drop(
            "DeviceRules._land_early", "self._memory.wait_where_packed(flight.record, flight.copy.end)"
        ),
    },
    "test_longer_graph_is_noticed_and_the_hooks_stay_on_for_longer_each_time": {
        "a graph that only begins like one that stays is noticed": replace(
            "HooksOff.end", "next_node - self._packs[0][0] != self._expected.num_nodes", "False"
        ),
    },
    "test_graph_without_room_for_half_as_much_again_keeps_its_hooks": {
        "hooks go only where there is room for a graph that only begins alike": never(
            "Saving.leave_unseen", "self._guard.closed is not None or not (...)"
        ),
    },
    "test_without_hooks_as_much_is_charged_and_counted": {
        "what autograd will keep by itself is charged as the hooks go": drop(
            "Saving.leave_unseen", "self._tracked.charge_unseen(graph, nbytes)"
        ),
    },
    "test_another_graph_than_the_expected_goes_on_in_a_log": {
        "what was kept for being expected is charged, if it is of another graph": drop(
            "HooksOff.begin", "self._charge()"
        ),
    },
    "test_two_graphs_by_turns_are_each_expected_in_their_turn": {
        "a graph is expected only after the one that it has come after": replace(
            "WholeGraphs.next_whole", "self._came_after.get(self.latest, (None, 0))", "next(iter(self._known), None), 9"
        ),
    },
    "test_hooks_around_the_scope_get_nothing": {
        "hooks around a scope get nothing of it": replace(
            "may_be_of_a_whole_graph", "top_hooks(False) is None", "True"
        ),
    },
    "test_backward_in_the_scope_leaves_the_hooks_as_they_were": {
        "hooks do not go in a backward, which puts them back": replace(
            "HooksOff._take_off", "current_backward() != _NONE", "False"
        ),
    },
}

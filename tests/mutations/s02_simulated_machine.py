"""S2: Simulated steps take the time and the memory of the machine that is described."""

from __future__ import annotations

from .changes import drop, never, replace

MUTATIONS = {
    "test_copies_of_one_direction_go_one_after_the_other_beside_those_of_the_other": {
        "copies of one direction go one after the other": replace(
            "_Stream.queue",
            """
            if self._is_idle:
                self._is_idle = False
                ...
            """,
            "if True: ...",
        ),
        "a copy is over when its bytes have moved": replace(
            "_Stream._run", "yield self._clock.work(...)\ncopy.end()", "copy.end()\nyield self._clock.work(...)"
        ),
        "each direction has its speed": replace("LinkCopies.__init__", "Activity.RELOAD", "Activity.OFFLOAD"),
        "the way out has its own": replace(
            "Link.bytes_per_second",
            "out if direction is Activity.OFFLOAD else back",
            "back if direction is Activity.OFFLOAD else out",
        ),
    },
    "test_both_directions_of_one_rank_are_slowed_and_those_of_two_ranks_are_not": {
        "each rank has its link": replace(
            "LinkCopies.__init__", "Copying(Activity.RELOAD, rank)", "Copying(Activity.RELOAD, 0)"
        ),
        "only both directions of one link slow each other": replace(
            "Sharing._copying", "num_ways[each.rank] == 2", "len(copying) > 1"
        ),
    },
    "test_copies_both_ways_share_what_the_link_carries_together": {
        "a link that carries both at full speed is no faster then": replace(
            "Link.bytes_per_second", "min(1.0, ...)", "..."
        ),
    },
    "test_copy_back_begins_when_the_copy_out_of_the_same_bytes_is_over": {
        "bytes come back when they have left": drop("_Stream._run", "if copy.ready is not None: ..."),
    },
    "test_computing_waits_for_all_that_it_has_to_and_for_nothing_else": {
        "computing waits for all copies that it needs": replace(
            "LinkCopies.catch_up", "while self._awaited: ...", "if self._awaited: ..."
        ),
        "all of its waits count": replace(
            "LinkCopies.catch_up", "self.waited_seconds += ...", "self.waited_seconds = ..."
        ),
    },
    "test_step_on_a_slow_link_takes_what_its_copies_take_but_for_what_may_be_on_its_way": {
        "those of a step are its own": replace(
            "_Run._step_since", "self._copies.waited_seconds - waited_seconds", "self._copies.waited_seconds"
        ),
        "computing waits at all": replace("Rank.act", "self._copies.catch_up()", "()"),
    },
    "test_write_of_what_was_on_an_accelerator_begins_when_its_copy_is_over": {
        "a write begins when the copy out is over": drop("SimulatedEngine._spill", "if record.ready is not None: ..."),
    },
    "test_kernels_are_not_slowed_by_what_the_cores_do": {
        "kernels do not take turns with the store's threads": replace(
            "Sharing.__call__", "1.0", "1 / crowding", inside="return ..."
        ),
    },
    "test_compute_on_an_accelerator_is_not_slowed_by_the_stores_threads": {
        "what computes on an accelerator are kernels": never("Rank.__init__", "workload.uses_device"),
    },
    "test_device_bytes_peak_is_what_stays_and_both_windows_where_backward_finds_copies_out_under_way": {
        "what is back counts as device memory": replace(
            "DeviceRules.used_bytes", "... + self.window.reloaded.used_bytes", "..."
        ),
        "what is on its way out, too": replace(
            "DeviceRules.held_bytes", "... + self.window.in_flight.used_bytes", "..."
        ),
        "also at the moment when it comes back": drop("DeviceRules.reload", "self._note_peak()"),
    },
    "test_device_bytes_peak_is_each_step_s_own": {
        "the most of a step is its own": drop("_Run._begin_peaks", "self._device.begin_peak()"),
    },
    "test_step_whose_tensors_the_device_keeps_copies_nothing": {
        "a plan knows what the device keeps": replace("_Run.steps", "settings.device_bytes", "0"),
    },
    "test_workload_of_step_has_what_is_on_an_accelerator_there_and_a_core_that_queues_its_work": {
        "what was recorded on an accelerator is there": never("workload_of", "pack.device != _HOST"),
        "its work is queued by one core": never("workload_of", "devices", inside="... if devices else ..."),
    },
    "test_workload_of_step_that_cannot_be_simulated_is_refused": {
        "of several accelerators none is simulated": never("workload_of", "len(devices) > 1"),
    },
}

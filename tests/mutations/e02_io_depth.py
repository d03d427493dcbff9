"""E2: As many records are at the drive as `io_depth` says, and their memory is counted."""

from __future__ import annotations

from .changes import drop, replace

MUTATIONS = {
    "test_io_depth_is_told_with_its_working_memory": {
        "the working memory of both ways is told": replace("LocalDisk.__init__", "2 * num_at_once", "num_at_once"),
        "there are lanes enough to fill them": replace(
            "Core.__init__", "NUM_AT_ONCE if options.disk is None else ...", "NUM_AT_ONCE"
        ),
    },
    "test_whoever_comes_when_all_turns_are_taken_waits_for_one": {
        "no more are at the drive": replace("ScratchPool.__init__", "num_turns", "num_turns + 1", inside="range(...)"),
    },
    "test_reads_have_turns_of_their_own": {
        "reads have turns of their own": replace(
            "scratch:ScratchTurns.__init__", "self.reads = ...", "self.reads = self.writes"
        ),
    },
    "test_open_with_a_bad_option_names_it_and_starts_nothing": {
        "a depth of none is refused": replace(
            "parse_io_depth", "1 <= value <= _MOST_IO_DEPTH", "0 <= value <= _MOST_IO_DEPTH"
        ),
    },
    "test_trial_gives_store_and_scope_its_settings": {
        "a trial has the depth that it is to try": replace("local_options", 'values["io_depth"]', 'given["io_depth"]'),
    },
    "test_search_where_the_host_budget_counts_pays_for_depth_with_it": {
        "tuning counts what a depth takes": replace(
            "working_bytes", "2 * (io_depth - NUM_AT_ONCE)", "io_depth - NUM_AT_ONCE"
        ),
    },
    "test_search_keeps_to_the_limit": {
        "and keeps it within the limit": replace("Space.most_host_bytes", "... - working_bytes(io_depth)", "..."),
    },
    "test_settings_are_those_of_the_trace_and_the_distance_of_the_default_is_none": {
        "tuning starts from the depth that was recorded": drop("ProgramRecording.settings", "store.io_depth"),
    },
    "test_settings_have_the_depth_of_the_trace_if_it_tells": {
        "and so does a plan": drop("planned_settings", "recorded.io_depth"),
    },
    "test_step_deeper_queue_is_used_only_as_far_as_there_are_turns_each_way": {
        "so many are at a simulated drive": replace("_engine", "num_turns=settings.num_turns", "num_turns=NUM_AT_ONCE"),
    },
    "test_step_read_takes_no_turn_from_the_writes": {
        "each way there, too": replace(
            "SimulatedEngine.__init__",
            "self._writes, self._reads = ...",
            "self._writes = self._reads = VirtualTurns(num_turns)",
        ),
    },
}

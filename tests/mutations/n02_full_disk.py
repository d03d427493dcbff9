"""N2: On a full disk the store does what `docs/project/internals/reliability.md` promises."""

from __future__ import annotations

from .changes import drop, never, replace

MUTATIONS = {
    "test_full_drive_raises_at_pack_and_goes_on_when_graphs_are_gone": {
        "a full drive is told as one": replace("is_out_of_space", "return ...", "return False"),
    },
    "test_budget_spent_raises_at_pack_and_goes_on_when_graphs_are_gone": {
        "the error has the figures": replace(
            "Rules.full_error", "host_bytes=self.windows.used_bytes[0]", "host_bytes=0"
        ),
    },
    "test_session_quota_spent_raises_and_leaves_the_neighbour_its_room": {
        "a session has no more than its quota": never(
            "Session.reserve", "self.disk_bytes + num_bytes > self.quota_bytes"
        ),
    },
    "test_drive_filled_by_others_raises_and_goes_on_when_they_leave": {
        "a drive that others have filled is told as full": replace("is_out_of_space", "return ...", "return False"),
    },
    "test_tensor_that_fits_nowhere_is_refused_and_smaller_ones_go_on": {
        "what fits nowhere is refused": replace(
            "Residency.flush", "raise self.rules.full_error(...) from ...", "return"
        ),
    },
    "test_deletes_refused_by_a_full_drive_are_done_when_it_has_room": {
        "deletes that were refused are tried again": drop("IndexEntries.delete", "self._undeleted[key] = location"),
        "leases too": drop("IndexEntries.delete", "self._undeleted_leases.add(number)"),
    },
    "test_index_that_the_drive_refuses_to_change_is_not_cleared": {
        "a drive that refuses to change the index has not damaged it": drop(
            "NamedHome._forget", "not may_be_short_write(error)"
        ),
    },
    "test_what_a_drive_refuses_that_others_fill_and_free_is_done_in_the_end": {
        "a short write that others' room came too late for is done again": replace(
            "Index._change_alone", "_MOST_TRIES", "1", inside="range(...)"
        ),
        "so is what the drive refused as a whole": drop(
            "_may_find_room", 'getattr(error, "code", None) == errno.ENOSPC'
        ),
    },
    "test_short_write_where_nobody_says_what_is_free_is_told_of_that_change_alone": {
        "where nobody says what is free, the other changes are told as they went": replace(
            "Index._change_alone", "OSError", "ZeroDivisionError", inside="try: ...\nexcept OSError: ..."
        ),
    },
    "test_session_is_not_refused_for_room_that_the_daemon_itself_holds": {
        "a session gets the room of an empty segment": replace(
            "IndexEntries.put_lease", "self.put(...)", "self._commits.submit(...)"
        ),
    },
    "test_daemon_that_finds_no_room_for_a_session_says_so": {
        "a session refused for want of room is told why": replace(
            "Connection._open",
            'f"no session can be opened, its drive has no room: {error.reason}"',
            'f"no session can be opened: {error}"',
        ),
    },
    "test_short_write_on_a_full_drive_is_a_full_drive": {
        "a short write without room is a full drive": never("Index._change_alone", "not has_room"),
    },
    "test_failing_drive.py": {
        "a drive that fails for good is told of as a failure": replace(
            "translated", "raise StorageIOError(...) from error", "raise"
        ),
    },
    "test_store_that_finds_no_room_to_open_says_that_the_drive_refuses": {
        "a store that finds no room to open says that the drive refuses": replace(
            "Core._start_engine", "(OSError, StoreFullError)", "OSError"
        ),
    },
}

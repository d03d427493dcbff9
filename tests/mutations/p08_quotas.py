"""P8: A session has a quota of bytes on disk and one of bytes in the queue."""

from __future__ import annotations

from .changes import always, drop, never, replace

MUTATIONS = {
    "test_quota_of_a_session_is_its_own": {
        "a session holds no more on disk than its quota": never(
            "Session.reserve", "self.disk_bytes + num_bytes > self.quota_bytes"
        ),
    },
    "test_write_that_found_no_room_counts_for_nothing": {
        "what was not written does not count": replace(
            "Records._store", "taken_bytes", "taken_bytes or num_bytes", inside="session.settle(...)"
        ),
    },
    "test_writes_beyond_the_quota_wait_and_reads_and_discards_do_not": {
        "a session has no more queued than its quota": always(
            "WriteQueue._has_room_for", "self.queued_bytes + num_bytes <= self.most_bytes"
        ),
        "reads do not wait for writes that are held back": replace(
            "Connection._request",
            "self._shared.lanes.read(...)",
            """
            read = partial(self._read, session, message, memory)
            self._held = partial(
                self._shared.lanes.read, number, message.num_bytes, lambda: self._guarded(read())
            )
            session.writes.add(0, lambda: (session.writes.end(0), self._held()))
            """,
        ),
    },
    "test_short_write_does_not_overtake_a_long_one": {
        "a write longer than that goes alone": drop("WriteQueue._has_room_for", "not self.queued_bytes"),
    },
    "test_default_budget_is_the_same_after_a_kill_whatever_was_stored": {
        "what is stored does not shrink the budget of the next daemon": replace(
            "Daemon._budgets", "free + home.taken_bytes", "free"
        ),
    },
    "test_home_tells_what_its_files_take_and_nothing_of_others": {
        "what others keep in its folder is not taken for its own": replace(
            "NamedHome.taken_bytes", "self._own_names()", "self._folder.names()"
        ),
    },
}

"""P1: A record is stored only after the index has committed."""

from __future__ import annotations

from .changes import replace

MUTATIONS = {
    "test_write_is_done_when_the_index_has_committed": {
        "a write returns when the index has its value": replace(
            "RecordShelf._put",
            "if outcome is None: ...",
            """
            if outcome is None:
                __import__("asyncio").ensure_future(self._commits.submit(put))
                outcome = Outcome(None)
            """,
        ),
        "a write returns when the index has its extent": replace(
            "RecordShelf._fill_and_enter",
            "return _Filled(written, self._commits.commit_now(...))",
            """
            put = ...
            __import__("threading").Thread(target=self._commits.commit_now, args=(put,)).start()
            return _Filled(written, Outcome(None))
            """,
        ),
    },
    "test_commits_of_jobs_and_batches_do_not_overlap": {
        "calls of the index do not overlap": replace("Commits._do", "with self._one_at_a_time: ...", "if True: ..."),
    },
    "test_resumed_only_when_the_jobs_of_the_lost_connection_have_ended": {
        "the daemon answers when the write has returned": replace(
            "Connection._write",
            "record = await self._store(session, message, memory)",
            """
            self._daemon.start(self._store(session, message, memory))
            record = Record(message.num_bytes, 1, "none", "", None)
            """,
        ),
    },
}

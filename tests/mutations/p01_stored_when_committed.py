"""P1: A record is stored only after the index has committed."""

from .changes import replace

MUTATIONS = {
    "test_write_is_done_when_the_index_has_committed": {
        "a write returns when the index has its value": replace(
            "IndexEntries.put",
            "if outcome is None: ...",
            """
            if outcome is None:
                __import__("asyncio").ensure_future(self.submit(put))
                outcome = Outcome(None)
            """,
        ),
        "a write returns when the index has its extent": replace(
            "LocalDisk._fill_and_enter",
            "return (written, self._entries.commit_now(...))",
            """
            arguments = ...,
            __import__("threading").Thread(target=self._entries.commit_now, args=arguments).start()
            return written, Outcome(None)
            """,
        ),
    },
    "test_commits_of_jobs_and_batches_do_not_overlap": {
        "calls of the index do not overlap": replace(
            "IndexEntries._do", "with self._one_at_a_time: ...", "if True: ..."
        ),
    },
    "test_resumed_only_when_the_jobs_of_the_lost_connection_have_ended": {
        "the daemon answers when the write has returned": replace(
            "Session.serve",
            "record = await self._store(message, memory)",
            """
            __import__("asyncio").ensure_future(self._store(message, memory))
            record = KeptRecord(message.num_bytes, 1, "none", "", None)
            """,
        ),
    },
}

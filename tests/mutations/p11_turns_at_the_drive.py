"""P11: Every session has a share of the turns at the drive."""

from __future__ import annotations

from .changes import drop, never, replace

MUTATIONS = {
    "test_reads_without_end_leave_writes_a_share_and_keep_theirs": {
        "reads that are queued without end leave writes a share": drop("Lanes._start", "self._owed_to_reads > 0"),
        "and reads go first all the same": never("Lanes._start", "self.reads.queue and self._owed_to_reads > 0"),
        "what a write owes to reads depends on its length": replace(
            "Lanes._start",
            "self._owed_to_reads = _READS_PER_WRITE * self._begin(self.writes)",
            "self._begin(self.writes)\nself._owed_to_reads = _READS_PER_WRITE",
        ),
    },
    "test_jobs_of_one_byte_are_not_free": {
        "a job of one byte is not free": replace("_Queued.cost_bytes", "... + JOB_BYTES", "..."),
    },
}

"""N1: Under injected faults the store does what `docs/project/internals/reliability.md` promises."""

from __future__ import annotations

from .changes import drop, never, replace

MUTATIONS = {
    "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[restore-read-random_latency-every]": {
        "late: whoever asks for bytes waits until they are there": replace(
            "HandingOut._await_bytes",
            "while record.state not in IN_MEMORY: ...",
            "if record.state not in IN_MEMORY: ...",
        ),
    },
    "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[restore-preadv-bandwidth-every]": {
        "slow: likewise": replace(
            "HandingOut._await_bytes",
            "while record.state not in IN_MEMORY: ...",
            "if record.state not in IN_MEMORY: ...",
        ),
    },
    "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[restore-read-late-every]": {
        "out of order: each completion is of its own record": replace(
            "Engine._restore_lane",
            "outcome: ... = await disk.read(...)",
            """
            self._read = record
            outcome: ... = await disk.read(...)
            record = self._read
            """,
        ),
    },
    (
        "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[spill-pwritev-short-every]",
        "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[restore-preadv-short-every]",
    ): {
        "what a short write leaves is written too": drop("_advance", "pending.appendleft(first[moved:])"),
    },
    "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[spill-write-EIO-1st]": {
        "a write that failed is told": drop("Rules._note_failure", "self.spill_error = error"),
    },
    "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[restore-read-EIO-every]": {
        "a read that failed is told, with its cause": replace(
            "HandingOut._raise_cause", "raise ... from cause", "raise ... from None"
        ),
    },
    "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[release-discard-EIO-1st]": {
        "what cannot be freed ends the store": replace(
            "Engine._discard_lane", "disk.discard(keys)", "asyncio.gather(disk.discard(keys), return_exceptions=True)"
        ),
    },
    "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[close-close-EIO-1st]": {
        "a failed close is told": replace("Engine.stop", "error, self._error = self._error, None", "error = None"),
    },
    "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[spill-write-ENOSPC-1st]": {
        "what a full drive has refused stays in memory": replace(
            "Rules.end_write", "Stored", "(Stored, StoreFullError)", inside="if has_moved: ...\nelse: ..."
        ),
    },
    (
        "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[spill-pwritev-torn-1st]",
        "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[spill-pwritev-torn-1st-zstd]",
    ): {
        "a torn record is refused": never("verify", "seed is not None and found != location.checksum"),
    },
    "test_fault_matrix.py::test_fault_in_a_step_right_bits_or_the_promised_error[offload-offload-EIO-1st]": {
        "a copy that failed is told": replace(
            "_Streams.copy_out",
            "record.ready = self._copies.copy_out(...)",
            """
            arguments = ...,
            try:
                record.ready = self._copies.copy_out(*arguments)
            except RuntimeError:
                record.ready = self._copies.copy_out(*arguments)
            """,
        ),
    },
    "test_nonsense_in_a_session_loses_the_connection_and_no_request": {
        "what a killed daemon has not answered is sent again": drop(
            "DaemonLink._resume_on_new_connection", "for request in self._pending.values(): ..."
        ),
    },
    "test_daemon_lost_in_a_step_for_good_is_told_in_time_and_what_comes_back_is_used_again[spill-write-1-one drive]": {
        "who waits for a daemon that stays away is told in time": drop("Reconnecting._resume_late", "self._tell(...)"),
    },
}

"""N5: The drive is written to no more than `docs/project/internals/reliability.md` promises."""

from __future__ import annotations

from .changes import drop, replace

MUTATIONS = {
    ("test_refills_evenly_up_to_a_day", "test_no_span_of_time_sees_more_than_a_day_and_what_refilled"): {
        "no more than a day's is saved up": replace(
            "WriteAllowance._refilled", "min(..., float(self.day_bytes))", "..."
        ),
    },
    "test_allowance_spent_keeps_in_memory_then_raises_and_goes_on_when_refilled": {
        "what is spent is refused": replace("LocalDisk._write", "num_bytes", "0", inside="allowance.take(...)"),
    },
    "test_allowance_counts_what_is_on_disk_not_what_was_given": {
        "what is on disk counts": drop("LocalDisk._write", "allowance.give_back(num_bytes - stored.stored_bytes)"),
    },
    "test_write_allowance.py": {
        "a daemon says what is left": replace(
            "LocalDisk.usage", "None if self._allowance is None else ...", "None and ..."
        ),
    },
}

"""What `tierstore trace show` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ..base.config import format_bytes
from ..tracing.causes import CAUSES
from ..tracing.summary import StepSummary

__all__ = ["steps_table"]


def steps_table(summaries: Sequence[StepSummary]) -> Table:
    """A row for each step: times, waits by cause, bytes. Only causes that occur have a column."""
    causes = [cause for cause in CAUSES if any(_waited(summary, cause) for summary in summaries)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "seconds", "forward", "backward", *(f"waits: {cause}" for cause in causes), "written", "read"):
        table.add_column(name, justify="right")
    for summary in summaries:
        backward = "-" if summary.backward_seconds is None else f"{summary.backward_seconds:.3f}"
        table.add_row(
            str(summary.number),
            f"{summary.seconds:.3f}",
            f"{summary.forward_seconds:.3f}",
            backward,
            *(f"{_waited(summary, cause):.3f}" for cause in causes),
            format_bytes(summary.written.nbytes),
            format_bytes(summary.read.nbytes),
        )
    return table


def _waited(summary: StepSummary, cause: str) -> float:
    return sum(by_cause.get(cause, 0.0) for by_cause in summary.wait_seconds.values())  # type: ignore[call-overload]

"""What tuning found, as people read it."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from .heat_map import heat_table
from .tuned import Candidate, Tuned

__all__ = ["tuned_view"]


def tuned_view(tuned: Tuned) -> Group:
    """The table of what was measured, the heat map, and the outcome."""
    num_tried = len(tuned.found.predicted)
    cut = "" if tuned.found.is_whole else ", until the time for that was up"
    failures = [f"{each.name!r} failed: {each.failure}" for each in tuned.candidates if each.failure is not None]
    table, heat_map = _candidates(tuned), heat_table(tuned.found)
    return Group(table, "", heat_map, "", f"{num_tried} settings were simulated{cut}.", *failures, tuned.reason)


def _candidates(tuned: Tuned) -> Table:
    rounds = max(len(each.step_seconds) for each in tuned.candidates)
    table = Table(title=f"Seconds of a step; measured: the median of {rounds} rounds", title_justify="left", box=None)
    table.add_column("", no_wrap=True)
    for name in ("predicted", "measured", "least to most"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("host_bytes + staging_bytes, ...")
    for each in tuned.candidates:
        table.add_row(*_row(each), style="bold" if each is tuned.chosen else "")
    return table


def _row(candidate: Candidate) -> list[str]:
    seconds = candidate.step_seconds
    return [
        candidate.name if candidate.is_allowed else f"{candidate.name} (above the limit)",
        _figure(candidate.predicted_seconds),
        "failed" if candidate.failure is not None else _figure(candidate.median_seconds),
        f"{min(seconds):.4f} to {max(seconds):.4f}" if seconds else "-",
        str(candidate.settings),
    ]


def _figure(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4f}"

"""The outcome of tuning as tables for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..base.config import format_bytes
from ..plain_text import plain
from .heat_map import heat_table
from .settings import AUTO, USUAL_INLINE_BYTES
from .tuned import Candidate, Tuned

__all__ = ["tuned_view"]

_MOST_SPACED_COLUMNS = 6


def tuned_view(tuned: Tuned) -> Group:
    """Tables of measurements and settings, the heat map, and the outcome. Fits into 80 columns."""
    until = "" if tuned.found.is_whole else " before --search-seconds ran out"
    notes = [f"{len(tuned.found.predicted)} settings were simulated{until}."]
    for each in tuned.candidates:
        if not each.is_allowed:
            notes.append(f"{each.label}: more memory than the limit; shown for comparison.")
        if each.failure is not None:
            notes.append(f"{each.label} failed: {each.failure}")
    tables: list[RenderableType] = [_steps(tuned), "", _settings(tuned), ""]
    if tuned.link is not None:
        tables += [_on_accelerator(tuned), ""]
        notes.append(f"They were simulated with {tuned.link}.")
    return Group(*tables, heat_table(tuned.found), "", *(Text(plain(each)) for each in (*notes, tuned.reason)))


def _steps(tuned: Tuned) -> Table:
    rounds = max(len(each.step_seconds) for each in tuned.candidates)
    reference = next(each for each in tuned.candidates if each.is_allowed)
    table = _table(
        f"Step time in seconds (measured: median of {rounds} rounds)",
        ("predicted", "measured", "least to most", f"relative to\n{reference.label}"),
    )
    for each in tuned.candidates:
        seconds = each.step_seconds
        cells = (
            _figure(each.predicted_seconds),
            "failed" if each.failure is not None else _figure(each.median_seconds),
            f"{min(seconds):.4f} to {max(seconds):.4f}" if seconds else "-",
            f"{statistics.median(each.ratios_to(reference)):.2f}" if each.median_seconds else "-",
        )
        _add_row(table, each, tuned, cells)
    return table


def _settings(tuned: Tuned) -> Table:
    """The candidates' settings. `inline_bytes` is shown only if they differ in it, or it is not the default."""
    with_inline = any(each.settings.inline_bytes != USUAL_INLINE_BYTES for each in tuned.candidates)
    names = ("host", "staging", "codec", "prefetch", "lookahead", "depth", *(["inline"] if with_inline else []))
    table = _table("Settings", names)
    for each in tuned.candidates:
        settings = each.settings
        cells = [
            format_bytes(settings.host_bytes),
            format_bytes(settings.staging_bytes),
            settings.codec,
            settings.prefetch,
            "as needed" if settings.lookahead_bytes is None else format_bytes(settings.lookahead_bytes),
            str(settings.io_depth),
        ]
        if with_inline:
            cells.append("all" if settings.inline_bytes is None else format_bytes(settings.inline_bytes))
        _add_row(table, each, tuned, cells)
    return table


def _on_accelerator(tuned: Tuned) -> Table:
    table = _table("On the accelerator", ("device_bytes", "found"))
    for each in tuned.candidates:
        is_found = each.settings.device_bytes == AUTO
        cells = (AUTO, format_bytes(each.found_bytes)) if is_found else (format_bytes(each.device_bytes), "-")
        _add_row(table, each, tuned, cells)
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    gap = 2 if len(columns) <= _MOST_SPACED_COLUMNS else 1
    table = Table(title=title, title_justify="left", box=None, padding=(0, 0, 0, gap), pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add_row(table: Table, candidate: Candidate, tuned: Tuned, cells: Sequence[str]) -> None:
    table.add_row(candidate.label, *cells, style="bold" if candidate is tuned.chosen else "")


def _figure(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4f}"

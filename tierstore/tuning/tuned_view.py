"""The outcome of tuning as tables for a terminal of 80 columns."""

from __future__ import annotations

import statistics

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..base.config import format_bytes
from ..plain_text import plain
from .tuned import Candidate, Tuned

__all__ = ["tuned_view"]


def tuned_view(tuned: Tuned) -> Group:
    """Tables of measurements and settings, and the outcome."""
    until = "" if tuned.found.is_whole else " before --search-seconds ran out"
    notes = [f"{len(tuned.found.predicted)} settings were simulated{until}."]
    if tuned.link is not None:
        notes.append(f"They were simulated with {tuned.link}.")
    for each in tuned.candidates:
        if not each.is_allowed:
            notes.append(f"{each.label}: more memory than the limit; shown for comparison.")
        if each.failure is not None:
            notes.append(f"{each.label} failed: {each.failure}")
    notes.append(tuned.reason)
    return Group(_steps(tuned), "", _settings(tuned), "", *(Text(plain(note, kept="\n")) for note in notes))


def _steps(tuned: Tuned) -> Table:
    rounds = max(len(each.step_seconds) for each in tuned.candidates)
    reference = next(each for each in tuned.candidates if each.is_allowed)
    title = f"Step time in seconds (measured: median of {rounds} rounds)"
    table = _table(title, "predicted", "measured", "least to most", f"relative to\n{reference.label}")
    for each in tuned.candidates:
        seconds = each.step_seconds
        cells = (
            _figure(each.predicted_seconds),
            "failed" if each.failure is not None else _figure(each.median_seconds),
            f"{min(seconds):.4f} to {max(seconds):.4f}" if seconds else "-",
            f"{statistics.median(each.ratios_to(reference)):.2f}" if each.median_seconds else "-",
        )
        table.add_row(each.label, *cells, style=_style(each, tuned))
    return table


def _settings(tuned: Tuned) -> Table:
    """What the candidates may differ in. All of their settings are in the file, and in the output of --json."""
    on_device = ("on device",) if tuned.link is not None else ()
    table = _table("Settings", "host", "staging", "codec", "prefetch", "depth", *on_device)
    for each in tuned.candidates:
        settings = each.settings
        sizes = format_bytes(settings.host_bytes), format_bytes(settings.staging_bytes)
        held = (format_bytes(each.device_bytes),) if on_device else ()
        cells = (*sizes, settings.codec, settings.prefetch, str(settings.io_depth), *held)
        table.add_row(each.label, *cells, style=_style(each, tuned))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 0, 0, 2), pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _style(candidate: Candidate, tuned: Tuned) -> str:
    return "bold" if candidate is tuned.chosen else ""


def _figure(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4f}"

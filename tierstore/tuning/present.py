"""`tierstore tune`: lines of progress on standard error, the result on standard output."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..base.config import format_bytes
from ..base.interrupts import ended_by_signals
from ..base.json_text import json_text
from ..base.new_file import check_new_file, make_file
from ..errors import ConfigError
from ..plain_text import plain
from .program import Program
from .report import read_report
from .tune import TuningPlan, tune
from .tuned import Tuned


def present(program: Program, plan: TuningPlan, *, config: Path, hardware: Path | None, as_json: bool) -> None:
    """Tune, print, and make the file `config`. Blocks for minutes.

    `hardware`: a report of the doctor; None: the machine is measured. `as_json`: print the outcome as JSON, and nothing
    else, on standard output.

    Raises:
        ConfigError: an argument cannot be used, or a file is there already or cannot be made.
        TrialFailedError: see `tune`.

    Main thread only. SIGTERM ends it, and the running trial, as Ctrl-C does.
    """
    check_new_file("--config", config)
    machine = None if hardware is None else read_report(hardware).measurements
    messages = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        messages.print(plain(line), markup=False, soft_wrap=True)

    with ended_by_signals():
        tuned = tune(program.run, machine, plan, say)
    if as_json:
        print(json_text(tuned.as_dict()))
    else:
        Console(highlight=False).print(tuned_view(tuned))
    sys.stdout.flush()
    try:
        make_file("--config", config, tuned.toml)
    except ConfigError:
        messages.print(tuned.toml, markup=False)  # so that a full disk does not lose the work of minutes
        raise
    say(f"wrote {config}")


# --- the outcome ------------------------------------------------------------------------------------------------------


def tuned_view(tuned: Tuned) -> Group:
    """The candidates in a table, best in bold, and the outcome."""
    notes = [f"{len(tuned.found.predicted)} settings were simulated."]
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
    rows = []
    for each in tuned.candidates:
        seconds, ratios = each.step_seconds, each.ratios_to(reference)
        measured = "failed" if each.failure is not None else _figure(each.median_seconds)
        spread = f"{min(seconds):.4f} to {max(seconds):.4f}" if seconds else "-"
        relative = f"{statistics.median(ratios):.2f}" if ratios else "-"
        rows.append((_figure(each.predicted_seconds), measured, spread, relative))
    title = f"Step time in seconds (measured: median of {rounds} rounds)"
    return _table(tuned, title, ("predicted", "measured", "least to most", f"relative to\n{reference.label}"), rows)


def _settings(tuned: Tuned) -> Table:
    """What the candidates may differ in. All of their settings are in the file, and in the output of --json."""
    columns = ("host", "staging", "codec", "prefetch", "depth")
    rows = [
        (
            format_bytes(each.settings.host_bytes),
            format_bytes(each.settings.staging_bytes),
            each.settings.codec,
            each.settings.prefetch,
            str(each.settings.io_depth),
        )
        for each in tuned.candidates
    ]
    return _table(tuned, "Settings", columns, rows)


def _table(tuned: Tuned, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A row for each candidate."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 0, 0, 2), pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for each, cells in zip(tuned.candidates, rows, strict=True):
        table.add_row(each.label, *cells, style="bold" if each is tuned.chosen else "")
    return table


def _figure(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4f}"

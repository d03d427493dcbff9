"""`tierstore tune`: lines of progress on standard error, the result on standard output."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..base.interrupts import ended_by_signals
from ..base.json_text import json_text
from ..base.new_file import check_new_file, make_file
from ..plain_text import plain
from .program import Program
from .tune import tune
from .tuned import Tuned


def present(program: Program, *, config: Path, as_json: bool, **limits: Any) -> None:
    """Tune, print, and make the file `config`. Blocks for minutes.

    `as_json`: print the outcome as JSON, and nothing else, on standard output. `limits`: see `tune`.

    Raises:
        ConfigError: an argument cannot be used, or a file is there already or cannot be made.
        TrialFailedError: see `tune`.

    Main thread only. SIGTERM ends it, and the running trial, as Ctrl-C does."""
    check_new_file("--config", config)
    program.check()
    messages = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        messages.print(plain(line), markup=False, soft_wrap=not messages.is_terminal)  # a terminal would break words

    with ended_by_signals():
        tuned = tune(program.run, say, **limits)
    if as_json:
        print(json_text(tuned.as_dict()))
    else:
        Console(highlight=False).print(tuned_view(tuned))
    sys.stdout.flush()
    make_file("--config", config, tuned.toml)  # a full disk does not lose the work of minutes: it was printed
    say(f"wrote {config}")


def tuned_view(tuned: Tuned) -> Group:
    """The candidates in a table, best in bold, and the file of the best. The settings of all are in the JSON."""
    notes = [f"{len(tuned.tried)} other settings were tried once, and the fastest measured by turns."]
    for each in (*tuned.candidates, *tuned.tried):
        if not each.is_allowed:
            notes.append(f"{each.label}: more memory than the limit; shown for comparison.")
        if each.failure is not None:
            notes.append(f"{each.label} failed: {each.failure}")
    return Group(_steps(tuned), "", *(Text(plain(note, kept="\n")) for note in (*notes, "", tuned.toml)))


def _steps(tuned: Tuned) -> Table:
    rounds = max(len(each.step_seconds) for each in tuned.candidates)
    reference = next(each for each in tuned.candidates if each.is_allowed)
    title = f"Step time in seconds (measured: median of {rounds} rounds at most)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 0, 0, 2), pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("first trial", "measured", "least to most", f"relative to\n{reference.label}"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in tuned.candidates:
        seconds, ratios = each.step_seconds, each.ratios_to(reference)
        measured = "failed" if each.failure is not None else _figure(each.median_seconds)
        spread = f"{min(seconds):.4f} to {max(seconds):.4f}" if seconds else "-"
        relative = f"{statistics.median(ratios):.2f}" if ratios else "-"
        style = "bold" if each is tuned.chosen else ""
        table.add_row(each.label, _figure(each.first_seconds), measured, spread, relative, style=style)
    return table


def _figure(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4f}"

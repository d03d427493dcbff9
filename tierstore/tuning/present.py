"""Tunes a program from the command line: progress on standard error, the result on standard output.

On a terminal the progress is a bar for each stage. Elsewhere it is lines, one for each trial at least.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from ..base.interrupts import ended_by_signals
from ..base.json_text import json_text
from ..base.new_file import check_distinct, check_new_file, make_file
from ..doctor.examine import NUM_EXAMINED
from ..errors import ConfigError
from ..hardware import Hardware, read_hardware
from ..plain_text import plain
from .heat_map import check_heat_map, write_heat_map
from .machine import measure_machine
from .program import Program
from .tune import TuningPlan, TuningProgress, tune
from .views import tuned_view

__all__ = ["Wanted", "present"]

_MOST_SILENT_SECONDS = 10.0
"""A stage without trials tells how far it is after this time."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The files to read and write.

    Attributes:
        config: file to make.
        heat_map: file to write; None: none.
        hardware: file that describes the machine; None: it is measured.
        as_json: print the outcome as JSON, and nothing else, on standard output.
    """

    config: Path
    heat_map: Path | None
    hardware: Path | None
    as_json: bool


def present(program: Program, plan: TuningPlan, wanted: Wanted) -> None:
    """Tune, print, and write the files asked for. Blocks for minutes.

    Raises:
        ConfigError: an argument cannot be used, or a file is there already or cannot be made.
        TrialFailedError: see `tune`.

    Main thread only. SIGTERM ends it, and the running trial, as Ctrl-C does.
    """
    check_distinct({"--hardware": wanted.hardware}, {"--config": wanted.config, "--heat-map": wanted.heat_map})
    check_new_file("--config", wanted.config)
    if wanted.heat_map is not None:
        check_heat_map(wanted.heat_map)
    described = None if wanted.hardware is None else read_hardware(wanted.hardware)
    messages = Console(stderr=True, highlight=False)
    with ended_by_signals(), _shown(messages) as told:

        def measure(directory: Path) -> Hardware:
            if described is not None:
                return described
            stage = "measuring the machine"
            told(stage, 0, NUM_EXAMINED)
            hardware = measure_machine(directory, lambda done, total: told(stage, done, total))
            told(stage, NUM_EXAMINED, NUM_EXAMINED)
            return hardware

        tuned = tune(program.run, measure, plan, told)
    if wanted.as_json:
        print(json_text(tuned.as_dict()))
    else:
        Console(highlight=False).print(tuned_view(tuned))
    sys.stdout.flush()
    try:
        make_file("--config", wanted.config, tuned.toml)
    except ConfigError:
        messages.print(tuned.toml, markup=False)  # so that a full disk does not lose the work of minutes
        raise
    messages.print(plain(f"wrote {wanted.config}"), markup=False)
    if wanted.heat_map is not None:
        write_heat_map(tuned.found, wanted.heat_map)
        messages.print(plain(f"wrote {wanted.heat_map}"), markup=False)


@contextmanager
def _shown(console: Console) -> Iterator[TuningProgress]:
    """Bars on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield _Lines(lambda line: console.print(plain(line), markup=False, soft_wrap=True))
        return
    with _bars(console) as bars:
        yield _Bars(bars)


class _Bars:
    """Shows a bar for each stage."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int | None = None, what: str = "") -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, what=what)
        self._bars.update(self._tasks[stage], completed=done, total=total, what=what)


class _Lines:
    """Says when a stage begins and ends, when a trial begins, and now and then how far a stage is."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._began_at: dict[str, float] = {}
        self._ended: set[str] = set()
        self._said_at = 0.0

    def __call__(self, stage: str, done: int, total: int | None = None, what: str = "") -> None:
        if stage in self._ended:
            return
        now = time.monotonic()
        is_new = stage not in self._began_at
        began_at = self._began_at.setdefault(stage, now)
        if done == total:
            self._ended.add(stage)
            line = f"{stage}: done in {now - began_at:.0f} s"
        elif what:
            line = f"{stage}: {done + 1} of {total}, {what}"
        elif is_new:
            line = f"{stage} ..."
        elif now - self._said_at >= _MOST_SILENT_SECONDS:
            line = f"{stage}: {done} done" if total is None else f"{stage}: {done} of {total} done"
        else:
            return
        self._said_at = now
        self._say(line)


def _bars(console: Console) -> Bars:
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
        console=console,
    )

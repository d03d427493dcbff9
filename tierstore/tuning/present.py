"""`tierstore tune`: lines of progress on standard error, the result on standard output."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from ..base.interrupts import ended_by_signals
from ..base.json_text import json_text
from ..base.new_file import check_distinct, check_new_file, make_file
from ..errors import ConfigError
from ..hardware import Hardware, read_hardware
from ..plain_text import plain
from .examine import NUM_EXAMINED
from .predicted import measure_machine
from .program import Program
from .tune import TuningPlan, tune
from .tuned_view import tuned_view

__all__ = ["Wanted", "present"]

_MOST_SILENT_SECONDS = 10.0
"""A stage without trials tells how far it is after this time."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The files to read and write.

    Attributes:
        config: file to make.
        hardware: file that describes the machine; None: it is measured.
        as_json: print the outcome as JSON, and nothing else, on standard output.
    """

    config: Path
    hardware: Path | None
    as_json: bool


def present(program: Program, plan: TuningPlan, wanted: Wanted) -> None:
    """Tune, print, and write the file asked for. Blocks for minutes.

    Raises:
        ConfigError: an argument cannot be used, or a file is there already or cannot be made.
        TrialFailedError: see `tune`.

    Main thread only. SIGTERM ends it, and the running trial, as Ctrl-C does.
    """
    check_distinct({"--hardware": wanted.hardware}, {"--config": wanted.config})
    check_new_file("--config", wanted.config)
    described = None if wanted.hardware is None else read_hardware(wanted.hardware)
    messages = Console(stderr=True, highlight=False)
    told = _Lines(lambda line: messages.print(plain(line), markup=False, soft_wrap=True))

    def measure(directory: Path) -> Hardware:
        if described is not None:
            return described
        stage = "measuring the machine"
        told(stage, 0, NUM_EXAMINED)
        hardware = measure_machine(directory, lambda done, total: told(stage, done, total))
        told(stage, NUM_EXAMINED, NUM_EXAMINED)
        return hardware

    with ended_by_signals():
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

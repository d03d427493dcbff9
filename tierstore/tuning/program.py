"""Trials of a program: started afresh for each, with `TIERSTORE_TUNE` in its environment, and ended in bounded time."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..base.interrupts import interrupts_held_back
from ..base.system_words import ending_of
from ..errors import ConfigError, TierStoreError
from ..store.trial import VARIABLE, TrialPlan
from .settings import TrialSettings

_END_SECONDS = 10.0
_MOST_LAST_WORDS = 2000
_WHOLE = "give the whole command, such as `tierstore tune -- python train.py`"


@dataclass(eq=False)
class TrialFailedError(TierStoreError):
    """A trial did not come to its end, or recorded no steps. All processes that it had started have ended.
    `last_words`: the end of the program's output; "": there was none."""

    what: str
    last_words: str = ""

    def _message(self) -> str:
        return f"{self.what}; it wrote:\n{self.last_words}" if self.last_words else self.what


@dataclass(frozen=True)
class Program:
    """A program, looked up as a shell does, that records `num_graphs` graphs in a trial. It is ended after
    `trial_seconds`; what it has recorded by then counts."""

    command: Sequence[str]
    num_graphs: int
    trial_seconds: float

    def check(self) -> None:
        """Raise ConfigError if there is no such program, which would be told only when a trial begins."""
        if shutil.which(self.command[0]) is None:
            raise ConfigError(
                "COMMAND", self.command[0], f"there is no such program, or it is not executable; {_WHOLE}"
            )

    def run(self, settings: TrialSettings | None, folder: Path) -> None:
        """Run it once, traced to `folder`, with these settings or (None) its own. Blocks; an interrupt ends the
        program. Main thread only.

        Raises:
            ConfigError: there is no such program.
            TrialFailedError: it failed, or recorded nothing. What it recorded until then is in `folder`.
        """
        store, offload = ({}, {}) if settings is None else (dict(settings.store), dict(settings.offload))
        plan = TrialPlan(folder=str(folder), num_graphs=self.num_graphs, store=store, offload=offload)
        place, said = folder / "plan", folder / "said"
        place.write_bytes(msgspec.json.encode(plan))
        exit_code = self._run(os.environ | {VARIABLE: str(place)}, said)
        if exit_code:
            raise TrialFailedError(f"{self.command[0]} {ending_of(exit_code)}", _last_words(said))
        if not any(folder.glob("*.jsonl")):
            when = f"within {self.trial_seconds:g} s" if exit_code is None else "before it ended"
            raise TrialFailedError(f"{self.command[0]} entered no scope of tiered_offload {when}", _last_words(said))

    def _run(self, environment: dict[str, str], said: Path) -> int | None:
        with said.open("wb") as output, interrupts_held_back() as let_through:
            # An interrupt just after a process was started would leave it running, before its `Popen` is known.
            try:
                process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    "COMMAND", self.command[0], f"the system does not start it: {error.strerror}; {_WHOLE}"
                ) from error
            with ExitStack() as undo:
                ended = os.pidfd_open(process.pid)
                undo.callback(os.close, ended)
                undo.callback(_end_group, process, ended)
                let_through()
                is_over = _has_ended(ended, self.trial_seconds)
        return process.returncode if is_over else None


def _has_ended(ended: int, seconds: float) -> bool:
    return bool(select.select([ended], [], [], seconds)[0])


def _end_group(process: subprocess.Popen[bytes], ended: int) -> None:
    """End the process and all that it has started. Before it is reaped, no other group can get its number."""
    try:
        if not _has_ended(ended, 0):
            os.killpg(process.pid, signal.SIGTERM)
            _has_ended(ended, _END_SECONDS)
    finally:  # even if a second Ctrl-C comes meanwhile
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_words(said: Path) -> str:
    with said.open("rb") as words:
        words.seek(max(0, said.stat().st_size - _MOST_LAST_WORDS))
        return words.read().decode(errors="replace").strip()

"""Starts one training run in a fresh process, and follows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .. import errors
from .runs import RunReport, RunRequest

__all__ = ["DemoFailedError", "WatchedRun", "run_in_fresh_process"]

_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch.use_deterministic_algorithms requires it on CUDA
    "MKL_CBWR": "AUTO,STRICT",  # without it Intel does not promise the same bits from run to run
}
"""Environment variables of both runs, unless the user has set them."""


@dataclass(frozen=True)
class WatchedRun:
    """Callbacks that follow a run.

    Attributes:
        started: called with the device in words.
        stepped: called after each step with its number, from 1, and its loss.
    """

    started: Callable[[str], None] = lambda device: None
    stepped: Callable[[int, float], None] = lambda step, loss: None


@dataclass(eq=False)
class DemoFailedError(errors.TierStoreError):
    """A run ended without a report.

    Attributes:
        variant: which run.
        exit_code: of its process; negative: the signal that ended it.
        last_words: what it wrote to standard error.
    """

    variant: str
    exit_code: int
    last_words: str

    def __str__(self) -> str:
        if self.exit_code < 0:
            ending = f"was ended by {signal.Signals(-self.exit_code).name}"
            if self.exit_code == -signal.SIGKILL:
                ending += " (out of memory?)"
        else:
            ending = f"ended with exit code {self.exit_code}"
        words = f"; it wrote:\n{self.last_words}" if self.last_words else " without a word"
        return f"the {self.variant} run {ending}{words}"


def run_in_fresh_process(variant: str, request: RunRequest, watch: WatchedRun) -> RunReport:
    """Run the request and wait for its report.

    Args:
        variant: the name of the run in an error.

    Raises:
        TierStoreError: what the run raised, raised again here.
        DemoFailedError: the run ended without a report, in any other way.
    """
    with (
        tempfile.TemporaryFile() as words,
        subprocess.Popen(
            [sys.executable, "-m", "tierstore.demo.worker", json.dumps(asdict(request))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            env=_ENVIRONMENT | os.environ,
        ) as process,
    ):
        try:
            report = _follow(process.stdout or (), watch)
        except BaseException:
            process.kill()
            raise
        exit_code = process.wait()
        if report is None:
            words.seek(0)
            raise DemoFailedError(variant, exit_code, words.read().decode(errors="replace").strip())
        return report


def _follow(lines: Iterable[str], watch: WatchedRun) -> RunReport | None:
    """Pass events on until the process closes its output, and return its report; `None`: there was none."""
    report = None
    for line in lines:
        event: dict[str, Any] = json.loads(line)
        if "error" in event:
            raise getattr(errors, event["error"])(**event["fields"])
        if "started" in event:
            watch.started(event["started"])
        elif "step" in event:
            watch.stepped(event["step"], event["loss"])
        else:
            report = RunReport(**event["report"])
    return report

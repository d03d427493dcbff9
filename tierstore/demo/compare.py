"""Runs the demo's two trainings, each in a fresh process, and compares them. Needs no torch itself."""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import errors
from ..base.config import SizeLike, parse_size
from .place import store_directory
from .settings import DemoSettings, load_text

HOST_SHARE = 8
"""By default `host_bytes` is the memory that plain training added, divided by this."""
_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch.use_deterministic_algorithms requires it on CUDA
    "MKL_CBWR": "AUTO,STRICT",  # without it Intel does not promise the same bits from run to run
}
"""Environment variables of both runs, unless the user has set them."""

Told = Callable[[dict[str, Any]], None]
"""Receives what a training tells: `{"started": device}`, then after each step `{"step": number, "loss": nats}`."""


@dataclass(frozen=True)
class RunReport:
    """The measurements of one run.

    Attributes:
        step_seconds: forward, backward and optimizer, per step.
        losses: nats per byte, per step.
        digests: per step, the SHA-256 of the loss and of every parameter's gradient as raw bytes, by name.
        peak_host_bytes: host memory added since before the first step, see NOTE [What is counted] in `memory.py`.
        peak_device_bytes: the same for memory allocated on the accelerator; None without an accelerator.
        stats: the store's own statistics after the last step; None without a store.
    """

    device: str
    torch_version: str
    step_seconds: Sequence[float]
    losses: Sequence[float]
    digests: Sequence[Mapping[str, str]]
    peak_host_bytes: int
    peak_device_bytes: int | None
    stats: Mapping[str, Any] | None

    @property
    def peak_bytes(self) -> int:
        return self.peak_host_bytes if self.peak_device_bytes is None else self.peak_device_bytes

    @property
    def typical_step_seconds(self) -> float:
        """The median of `step_seconds` without the first step, which warms up allocators and the store's forecast."""
        return statistics.median(self.step_seconds[1:] or self.step_seconds)

    def figures(self) -> dict[str, Any]:
        return {
            "peak_bytes": self.peak_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "step_seconds": self.typical_step_seconds,
            "step_seconds_each": list(self.step_seconds),
            "loss": self.losses[-1],
            "loss_each": list(self.losses),
        }


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs: the step, counted from 1, and "loss" or the name of the parameter."""

    step: int
    name: str


def first_difference(one: Sequence[Mapping[str, str]], other: Sequence[Mapping[str, str]]) -> Difference | None:
    """Compare two runs' digests, step by step. A step or name that only one run has is a difference."""
    for step in range(1, max(len(one), len(other)) + 1):
        left, right = (dict(run[step - 1]) if step <= len(run) else {} for run in (one, other))
        for name in left | right:
            if left.get(name) != right.get(name):
                return Difference(step, name)
    return None


@dataclass(frozen=True)
class DemoResult:
    """The results of both runs: `plain` without a store, `stored` with one whose budget is `host_bytes`."""

    settings: DemoSettings
    host_bytes: int
    plain: RunReport
    stored: RunReport

    @property
    def difference(self) -> Difference | None:
        return first_difference(self.plain.digests, self.stored.digests)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Programs may rely on the keys."""
        return {
            "gradients_identical": self.difference is None,
            "first_difference": None if self.difference is None else asdict(self.difference),
            "host_bytes": self.host_bytes,
            "plain": self.plain.figures(),
            "tierstore": self.stored.figures() | {"stats": self.stored.stats},
            "settings": asdict(self.settings),
            "device": self.plain.device,
            "versions": {"python": platform.python_version(), "torch": self.plain.torch_version},
        }


@dataclass(eq=False)
class DemoFailedError(errors.TierStoreError):
    """A run ended without a report. `exit_code`: negative: the signal. `last_words`: its standard error."""

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


def run_demo(
    settings: DemoSettings,
    *,
    path: str | None = None,
    host_bytes: SizeLike | None = None,
    chosen: Callable[[Path], None] = lambda directory: None,
    running: Callable[[int | None], Told] = lambda host_bytes: lambda event: None,
) -> DemoResult:
    """Train plainly, then with a store, each in a fresh process; blocks until both are done.

    Args:
        path: the store's directory; None: one on a disk. Nothing is left there.
        host_bytes: the store's budget; None: an eighth of what plain training added to memory.
        chosen: called with the directory of the store, before anything runs.
        running: called before each run with the store's budget (None: the plain run); returns what the run tells.

    Raises:
        ConfigError: an option cannot be used; raised before the first run if possible.
        TierStoreError: a run failed; only what its store held is lost.
    """
    budget = None if host_bytes is None else parse_size(host_bytes, "--host-bytes")
    load_text(settings.text, at_least_bytes=settings.context + 1)
    directory = store_directory(path)
    chosen(directory)
    plain = run_training("plain", settings, told=running(None))
    if budget is None:
        budget = plain.peak_bytes // HOST_SHARE
    stored = run_training("tierstore", settings, str(directory), budget, told=running(budget))
    return DemoResult(settings, budget, plain, stored)


def run_training(
    variant: str, settings: DemoSettings, store_path: str | None = None, host_bytes: int = 0, *, told: Told
) -> RunReport:
    """Run `worker.py` in a fresh process, and wait for its report. What the run raised is raised again here. Raises
    DemoFailedError: the run ended without a report, in any other way."""
    request = json.dumps([asdict(settings), store_path, host_bytes])
    report = None
    with (
        tempfile.TemporaryFile() as words,
        subprocess.Popen(
            [sys.executable, "-m", "tierstore.demo.worker", request],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            env=_ENVIRONMENT | os.environ,
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                event: dict[str, Any] = json.loads(line)
                if "error" in event:
                    raise getattr(errors, event["error"])(**event["fields"])
                if "report" in event:
                    report = RunReport(**event["report"])
                else:
                    told(event)
        except BaseException:
            process.kill()
            raise
        exit_code = process.wait()
        if report is None:
            words.seek(0)
            raise DemoFailedError(variant, exit_code, words.read().decode(errors="replace").strip())
        return report

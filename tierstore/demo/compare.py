"""Runs the demo's two trainings and compares them."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.config import SizeLike, parse_size
from .launch import DemoFailedError, WatchedRun, run_in_fresh_process
from .place import store_directory
from .runs import Difference, RunReport, RunRequest, first_difference
from .settings import DemoSettings
from .text import load_text

__all__ = ["DemoFailedError", "DemoResult", "run_demo"]

HOST_SHARE = 8
"""By default `host_bytes` is the memory that plain training added, divided by this."""


@dataclass(frozen=True)
class DemoResult:
    """The results of both runs.

    Attributes:
        settings: the same for both.
        host_bytes: the store's budget of host memory.
        plain: the run without a store.
        stored: the run with it.
        difference: where gradients or losses first differ; `None`: they are bitwise the same at every step.
    """

    settings: DemoSettings
    host_bytes: int
    plain: RunReport
    stored: RunReport

    @property
    def difference(self) -> Difference | None:
        """See the class."""
        return first_difference(self.plain.digests, self.stored.digests)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Programs may rely on the keys."""
        return {
            "gradients_identical": self.difference is None,
            "first_difference": None if self.difference is None else asdict(self.difference),
            "host_bytes": self.host_bytes,
            "plain": _figures(self.plain),
            "tierstore": _figures(self.stored) | {"stats": self.stored.stats},
            "settings": asdict(self.settings),
            "device": self.plain.device,
            "versions": {"python": platform.python_version(), "torch": self.plain.torch_version},
        }


def _figures(run: RunReport) -> dict[str, Any]:
    return {
        "peak_bytes": run.peak_bytes,
        "peak_host_bytes": run.peak_host_bytes,
        "peak_device_bytes": run.peak_device_bytes,
        "step_seconds": run.typical_step_seconds,
        "step_seconds_each": list(run.step_seconds),
        "loss": run.losses[-1],
        "loss_each": list(run.losses),
    }


@dataclass(frozen=True)
class DemoWatch:
    """Callbacks that follow the demo.

    Attributes:
        chosen: called with the directory of the store, before anything runs.
        running: called before each run with the store's budget (`None`: the plain run); returns its watch.
    """

    chosen: Callable[[Path], None] = lambda directory: None
    running: Callable[[int | None], WatchedRun] = lambda host_bytes: WatchedRun()


def run_demo(
    settings: DemoSettings,
    *,
    path: str | None = None,
    host_bytes: SizeLike | None = None,
    watch: DemoWatch | None = None,
) -> DemoResult:
    """Train plainly, then with a store, each in a fresh process; blocks until both are done.

    Args:
        settings: what to train.
        path: the store's directory; `None`: one on a disk. Nothing is left there.
        host_bytes: the store's budget; `None`: an eighth of what plain training added to memory.
        watch: callbacks that follow the demo.

    Raises:
        ConfigError: an option cannot be used; raised before the first run if possible.
        TierStoreError: a run failed; only what its store held is lost.
    """
    watch = watch or DemoWatch()
    budget = None if host_bytes is None else parse_size(host_bytes, "--host-bytes")
    load_text(settings.text, at_least_bytes=settings.context + 1)
    directory = store_directory(path)
    watch.chosen(directory)
    plain = run_in_fresh_process("plain", RunRequest(settings), watch.running(None))
    if budget is None:
        budget = plain.peak_bytes // HOST_SHARE
    request = RunRequest(settings, str(directory), budget)
    stored = run_in_fresh_process("tierstore", request, watch.running(budget))
    return DemoResult(settings, budget, plain, stored)

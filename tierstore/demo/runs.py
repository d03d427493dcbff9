"""The request and the report of a training run, and the comparison of two reports. Pure, without torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .settings import DemoSettings

__all__ = ["Difference", "RunReport", "RunRequest", "first_difference"]


@dataclass(frozen=True)
class RunRequest:
    """The request of one run, which has a process of its own.

    Attributes:
        settings: what to train.
        store_path: the store's directory; `None`: train plainly, without a store.
        host_bytes: the store's budget of host memory.
    """

    settings: DemoSettings
    store_path: str | None = None
    host_bytes: int = 0


@dataclass(frozen=True)
class RunReport:
    """The measurements of one run.

    Attributes:
        device: in words.
        torch_version: `torch.__version__`.
        num_threads: threads that torch computes with on the CPU.
        step_seconds: forward, backward and optimizer, per step.
        losses: nats per byte, per step.
        digests: per step, the SHA-256 of the loss and of every parameter's gradient as raw bytes, by name.
        peak_host_bytes: host memory added since before the first step, see NOTE [What is counted] in `memory.py`.
        peak_device_bytes: the same for memory allocated on the accelerator; `None` without an accelerator.
        stats: the store's own statistics after the last step; `None` without a store.
    """

    device: str
    torch_version: str
    num_threads: int
    step_seconds: Sequence[float]
    losses: Sequence[float]
    digests: Sequence[Mapping[str, str]]
    peak_host_bytes: int
    peak_device_bytes: int | None
    stats: Mapping[str, Any] | None

    @property
    def peak_bytes(self) -> int:
        """The peak of the memory that is scarce: the accelerator's if there is one, else the host's."""
        return self.peak_host_bytes if self.peak_device_bytes is None else self.peak_device_bytes

    @property
    def typical_step_seconds(self) -> float:
        """The median of `step_seconds` without the first step, which warms up allocators and the store's forecast."""
        return statistics.median(self.step_seconds[1:] or self.step_seconds)


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        step: the step, counted from 1.
        name: "loss", or the parameter whose gradient differs.
    """

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

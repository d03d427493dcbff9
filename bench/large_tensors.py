"""Saved tensors as large as the window for what is being moved: what does a step cost beside compute alone?

A chain of element-wise kernels on one thread, each of which saves 128 MiB; twice as much as `host_bytes` holds has to
go to the drive and to come back. The default takes from `host_bytes` what several of the largest need to be on their
way at once; `staging_bytes` that is given is kept to. "No store" keeps all of it in memory: that is compute alone.

Forward is told beside the whole step: many drives read more slowly than they write, so backward shows the drive.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from tierstore import TierStore, tiered_offload

from .goals import Goal
from .harness import Benchmark, main_of_one_variant

TENSOR_BYTES = 128 * 2**20
HOST_BYTES = 2**30
NUM_LAYERS = 16
STEPS = 3
STAGING = {"default": None, "staging 112 MiB": "112MiB", "staging 1 GiB": "1GiB"}

BENCHMARK = Benchmark(
    name="large_tensors",
    question="Saved tensors of 128 MiB, larger than the window for what moves: a step beside compute alone",
    variants=("no store", *STAGING),
    rounds=2,
    settings={"tensor_bytes": TENSOR_BYTES, "layers": NUM_LAYERS, "host_bytes": HOST_BYTES, "steps": STEPS},
    goals=(
        Goal("forward, of compute alone", "forward_seconds", "default", at_most=1.2, of=("no store",)),
        Goal("forward, of the largest window's", "forward_seconds", "default", at_most=1.05, of=("staging 1 GiB",)),
    ),
    plotted=("forward_seconds", "step_seconds"),
)


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Medians of the steps after the first."""
    torch.set_num_threads(1)
    if variant == "no store":
        return _figures([_step(None) for _ in range(STEPS)])
    options = {} if STAGING[variant] is None else {"staging_bytes": STAGING[variant]}
    with TierStore(scratch, host_bytes=HOST_BYTES, codec="none", **options) as store:  # type: ignore[arg-type]
        return _figures([_step(store) for _ in range(STEPS)])


def _step(store: TierStore | None) -> dict[str, float]:
    batch = torch.rand(TENSOR_BYTES // 4, requires_grad=True)
    before = None if store is None else store.stats()
    started = time.perf_counter()
    if store is None:
        hidden = _forward(batch)
    else:
        with tiered_offload(store):
            hidden = _forward(batch)
    halfway = time.perf_counter()
    hidden.backward(torch.ones_like(hidden))
    seconds = time.perf_counter() - started
    figures = {"forward_seconds": halfway - started, "step_seconds": seconds}
    if store is not None and before is not None:
        after = store.stats()
        for cause, name in (("pack waits for budget", "pack_waits"), ("unpack waits for restore", "unpack_waits")):
            figures[f"{name}_seconds"] = after.stall_seconds[cause] - before.stall_seconds[cause]
        figures["written_bytes"] = after.written_bytes - before.written_bytes
        figures["host_peak_bytes"] = after.host_bytes_peak
    return figures


def _forward(hidden: torch.Tensor) -> torch.Tensor:
    for _ in range(NUM_LAYERS):
        hidden = torch.sin(hidden)  # saves what it was given
    return hidden


def _figures(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps[1:]) for name in steps[0]}


if __name__ == "__main__":
    main_of_one_variant(measure)

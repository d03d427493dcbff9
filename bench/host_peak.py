"""How much host memory does a store hold at most, beside what it promises, and does the process really shrink to that?

A chain of operations that save tensors of 1 to 24 MiB, each tensor twice, far more than any of the budgets; backward
runs twice over each graph, and the second step knows the order of the first. In one variant a tensor is larger than
the staging window. A thread asks the store what it holds and the kernel what the process has, as often as it can; the
store's own peak of each window is there beside what the samples found.

What the process has beyond what the store accounts for is the newest saved tensors, which are others' until the next
one is saved, gradients, the working memory of the I/O threads, and pages that the kernel has not taken back yet.
"""

from __future__ import annotations

import statistics
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierstore import StoreStats, TierStore, tiered_offload
from tierstore.demo.memory import resident_bytes

from .goals import Goal
from .harness import Benchmark, main_of_one_variant

MIB = 2**20
SIZES = tuple(MIB * size for size in (16, 1, 24, 6, 3, 8))
NUM_TENSORS = 96
OVERSIZE_BYTES = 160 * MIB
STEPS = 2
BUDGETS = {
    "budget 0": 0,
    "budget 32 MiB": 32 * MIB,
    "budget 128 MiB": 128 * MIB,
    "budget 512 MiB": 512 * MIB,
    "budget 128 MiB, a tensor of 160 MiB": 128 * MIB,
}

BENCHMARK = Benchmark(
    name="host_peak",
    question="The most host memory that a store holds, beside what it promises",
    variants=tuple(BUDGETS),
    compare="none",
    rounds=1,  # each figure is already a peak or a median over some thousand samples
    at_once=2,
    settings={"sizes_bytes": SIZES, "num_tensors": NUM_TENSORS, "oversize_bytes": OVERSIZE_BYTES, "steps": STEPS},
    plotted=("promised_bytes", "held_bytes", "process_added_bytes"),
    goals=(
        *(Goal("host memory held, of what is promised", "held_of_promised", variant, at_most=1) for variant in BUDGETS),
        Goal("the window for what is moved", "window_bytes", "budget 128 MiB", at_most=128 * MIB),
    ),
)


class SaveOne(torch.autograd.Function):
    """The identity, which saves a tensor of its own for backward, and reads it there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        return gradient + saved[-1], None


class Sampler:
    """A thread that looks at store and process until the `with` block ends.

    Args:
        store: to ask.
        host_bytes, largest_bytes: parts of the promise: its budget, and its largest tensor.
    """

    def __init__(self, store: TierStore, host_bytes: int, largest_bytes: int) -> None:
        self.held_bytes = self.held_of_promised = self.promised_bytes = self.process_added_bytes = 0.0
        self.lent_bytes = 0
        self.num_samples = 0
        self.beyond_bytes: list[int] = []
        self._store = store
        self._fixed_bytes = host_bytes + store.stats().staging_bytes + largest_bytes
        self._level_bytes = resident_bytes()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(0.001):
            self._look(self._store.stats(), resident_bytes() - self._level_bytes)

    def _look(self, stats: StoreStats, added_bytes: int) -> None:
        held = stats.host_bytes + stats.staging_used_bytes + stats.lent_bytes
        promised = self._fixed_bytes + stats.lent_bytes
        self.num_samples += 1
        if held > self.held_bytes:
            self.held_bytes, self.promised_bytes, self.lent_bytes = held, promised, stats.lent_bytes
        self.held_of_promised = max(self.held_of_promised, held / promised)
        self.process_added_bytes = max(self.process_added_bytes, added_bytes)
        self.beyond_bytes.append(added_bytes - held)


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """The most that was held at once, against the promise at that time, and what the process had."""
    torch.set_num_threads(1)
    host_bytes = BUDGETS[variant]
    sizes = [SIZES[number % len(SIZES)] for number in range(NUM_TENSORS)]
    if "a tensor of" in variant:
        sizes[NUM_TENSORS // 2] = OVERSIZE_BYTES
    with TierStore(scratch, host_bytes=host_bytes, codec="none", return_memory="always") as store:
        with Sampler(store, host_bytes, max(sizes)) as seen:
            for _ in range(STEPS):
                run_step(store, sizes)
        stats, staging = store.stats(), store.residency.rules.windows.staging
    return {
        "held_bytes": seen.held_bytes,
        "promised_bytes": seen.promised_bytes,
        "lent_bytes": seen.lent_bytes,
        "held_of_promised": seen.held_of_promised,
        "host_peak_bytes": stats.host_bytes_peak,
        "staging_peak_bytes": staging.peak_bytes,
        "window_bytes": stats.staging_bytes,
        "process_added_bytes": seen.process_added_bytes,
        "process_beyond_held_bytes": statistics.median(seen.beyond_bytes),
        "spilled_bytes": stats.spilled_bytes,
        "num_samples": seen.num_samples,
    }


def run_step(store: TierStore, sizes: list[int]) -> None:
    """Forward with every tensor saved twice, and backward twice; raises RuntimeError for a wrong gradient."""
    x = torch.zeros(1, requires_grad=True)
    with tiered_offload(store):
        y = x
        for number, size in enumerate(sizes):
            saved = torch.full((size // 4,), float(number))
            y = SaveOne.apply(SaveOne.apply(y, saved), saved)
            del saved
    expected = 1.0 + sum(2.0 * number for number in range(len(sizes)))
    for is_last in (False, True):
        (gradient,) = torch.autograd.grad(y, x, retain_graph=not is_last)
        if gradient.item() != expected:
            raise RuntimeError(f"the gradient is {gradient.item()}, not {expected}")


if __name__ == "__main__":
    main_of_one_variant(measure)

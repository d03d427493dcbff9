"""What does a saved tensor cost on the training thread, beyond no hooks, when the budget is not reached?

A chain of operations that do nothing but save a fresh tensor of 1 MiB each, whose memory nobody touches: what
is left is autograd's own cost, and that of pack, unpack and release. All are live at once, as in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .peers import detach_only, save_on_cpu

TENSOR_BYTES = 2**20
TENSORS_PER_STEP = 256
STEPS = 40

BENCHMARK = Benchmark(
    name="pack_cost",
    question="Cost of one saved tensor on the training thread, budget not reached (and beyond no hooks)",
    variants=("no hooks", "detach hooks", "save_on_cpu", "tierstore"),
    compare="difference",
    settings={"tensor_bytes": TENSOR_BYTES, "tensors_per_step": TENSORS_PER_STEP, "steps": STEPS},
    goals=(
        Goal("pack, beyond no hooks", "forward_microseconds", "tierstore", at_most=8, beyond="no hooks"),
        Goal(
            "pack, of what save_on_cpu costs",
            "forward_microseconds",
            "tierstore",
            at_most=8,
            of=("save_on_cpu",),
            beyond="no hooks",
        ),
        Goal(
            "pack, unpack and release, of what save_on_cpu costs",
            "both_microseconds",
            "tierstore",
            at_most=8,
            of=("save_on_cpu",),
            beyond="no hooks",
        ),
    ),
)

Forward = Callable[[], AbstractContextManager[object]]


class SaveOne(torch.autograd.Function):
    """The identity, which saves a tensor of its own for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty(TENSOR_BYTES, dtype=torch.uint8))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (_saved,) = ctx.saved_tensors
        return gradient


@contextmanager
def tierstore(scratch: Path) -> Iterator[Forward]:
    from tierstore import TierStore, tiered_offload

    with TierStore(scratch, host_bytes=4 * TENSORS_PER_STEP * TENSOR_BYTES) as store:
        yield lambda: tiered_offload(store, min_bytes=TENSOR_BYTES)


VARIANTS: dict[str, Callable[[Path], AbstractContextManager[Forward]]] = {
    "no hooks": lambda scratch: nullcontext(nullcontext),
    "detach hooks": lambda scratch: nullcontext(detach_only),
    "save_on_cpu": lambda scratch: nullcontext(save_on_cpu),
    "tierstore": tierstore,
}


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Median microseconds per saved tensor in forward, backward and both."""
    torch.set_num_threads(1)
    with VARIANTS[variant](scratch) as forward:
        steps = [time_step(forward) for _ in range(STEPS)][STEPS // 4 :]
    forwards, backwards = ([step[part] for step in steps] for part in (0, 1))
    return {
        "forward_microseconds": statistics.median(forwards),
        "backward_microseconds": statistics.median(backwards),
        "both_microseconds": statistics.median(map(sum, steps)),
    }


def time_step(forward: Forward) -> tuple[float, float]:
    """Microseconds per saved tensor of one forward and of one backward."""
    x = torch.ones(1, requires_grad=True)
    started = time.perf_counter()
    with forward():
        y = x
        for _ in range(TENSORS_PER_STEP):
            y = SaveOne.apply(y)
    halfway = time.perf_counter()
    y.backward()
    finished = time.perf_counter()
    return tuple(1e6 * seconds / TENSORS_PER_STEP for seconds in (halfway - started, finished - halfway))


if __name__ == "__main__":
    main_of_one_variant(measure)

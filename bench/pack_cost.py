"""What does a saved tensor cost on the training thread, beyond no hooks, when the budget is not reached?

A chain of operations that do nothing but save a fresh tensor of 1 MiB each, whose memory nobody touches: what
is left is autograd's own cost, and that of pack, unpack and release. All are live at once, as in training.

The costs are of one microsecond to ten, and a busy machine makes one step slower than the next by more than that. So
every variant takes a step in every turn, in an order that is drawn for each, and what counts is the median over the
turns of how much longer its step took than the one without hooks. A burst of noise then spoils some turns and not a
variant.

Where other programs want the same cores all the time, that is not enough: the longer a step, the more often it loses
its core. So the CPU time of the thread is given beside, to tell such a machine by. No goal is about it, since it leaves
out what the thread waits for.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierstore import TierStore, tiered_offload

from .goals import Goal
from .harness import Benchmark
from .peers import detach_only, save_on_cpu
from .trainings import Forward

TENSOR_BYTES = 2**20
TENSORS_PER_STEP = 256
TURNS = 200
WARMUP_TURNS = 50
FLOOR = "no hooks"
VARIANTS = (FLOOR, "detach hooks", "save_on_cpu", "tierstore")
_CALLS = "10 calls are left"
_OF_PEER: dict[str, Any] = {"at_most": 6, "of": ("save_on_cpu",), "beyond": FLOOR, "if_missed": _CALLS}

BENCHMARK = Benchmark(
    name="pack_cost",
    question="Cost of one saved tensor on the training thread, budget not reached",
    variants=VARIANTS,
    processes={"by turns": VARIANTS},
    rounds=5,
    plotted=("forward_microseconds", "backward_microseconds", "both_microseconds"),
    goals=(
        Goal("pack, beyond no hooks", "forward_microseconds", "tierstore", at_most=5, beyond=FLOOR, if_missed=_CALLS),
        Goal("pack, of what save_on_cpu costs", "forward_microseconds", "tierstore", **_OF_PEER),
        Goal("pack, unpack and release, of what save_on_cpu costs", "both_microseconds", "tierstore", **_OF_PEER),
    ),
)

Turn = Mapping[str, Mapping[str, float]]
"""A step of each variant, taken one after another: microseconds per saved tensor, by figure."""


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


def measure(process: str, scratch: Path) -> Turn:
    torch.set_num_threads(1)
    draw = random.Random(0)
    with TierStore(scratch, host_bytes=4 * TENSORS_PER_STEP * TENSOR_BYTES) as store:
        forwards: dict[str, Forward] = {
            FLOOR: nullcontext,
            "detach hooks": detach_only,
            "save_on_cpu": save_on_cpu,
            "tierstore": lambda: tiered_offload(store, min_bytes=TENSOR_BYTES),
        }
        turns = [
            {variant: time_step(forwards[variant]) for variant in draw.sample(VARIANTS, len(VARIANTS))}
            for _ in range(TURNS)
        ]
    return typical(turns[WARMUP_TURNS:])


def typical(turns: Sequence[Turn]) -> Turn:
    """The floor's medians; and of the others these plus the median of what they took longer in the same turn."""
    floor = {figure: statistics.median(turn[FLOOR][figure] for turn in turns) for figure in turns[0][FLOOR]}
    return {
        variant: {
            figure: level + statistics.median(turn[variant][figure] - turn[FLOOR][figure] for turn in turns)
            for figure, level in floor.items()
        }
        for variant in VARIANTS
    }


def time_step(forward: Forward) -> dict[str, float]:
    x = torch.ones(1, requires_grad=True)
    started, cpu_started = time.perf_counter(), time.thread_time()
    with forward():
        y = x
        for _ in range(TENSORS_PER_STEP):
            y = SaveOne.apply(y)
    halfway, cpu_halfway = time.perf_counter(), time.thread_time()
    y.backward()
    finished, cpu_finished = time.perf_counter(), time.thread_time()
    seconds = {
        "forward_microseconds": halfway - started,
        "backward_microseconds": finished - halfway,
        "both_microseconds": finished - started,
        "forward_cpu_microseconds": cpu_halfway - cpu_started,
        "both_cpu_microseconds": cpu_finished - cpu_started,
    }
    return {figure: 1e6 * each / TENSORS_PER_STEP for figure, each in seconds.items()}

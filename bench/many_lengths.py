"""What does it cost that graphs of many lengths begin alike?

A GRU cell over sequences: a shorter graph is the beginning of each longer one, so forward tells only step by step which
it is. "The longest again" is a step over 64 cells, after one step of each length in descending order: then each of the
lengths is predicted once. "200 lengths" are drawn from so many; fewer are remembered. What is known of graphs is asked
for on the thread that trains; the time of that is told, and its share of the CPU time of the step on that thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tierstore import TierStore, tiered_offload

from .goals import Goal
from .harness import Benchmark

LONGEST, MANY = "the longest again", "200 lengths"
NUM_REMEMBERED, NUM_MANY, NUM_DRAWN, NUM_MEASURED = 64, 200, 72, 6
WIDTH = {LONGEST: 256, MANY: 128}
"""Of the state; the batch is as large."""

BENCHMARK = Benchmark(
    name="many_lengths",
    question="Predicting which of many graphs a step is, that begin alike",
    variants=(LONGEST, MANY),
    processes={LONGEST: (LONGEST,), MANY: (MANY,)},
    plotted=("share",),
    goals=(
        Goal("of 64 known lengths, of the step", "share", LONGEST, at_most=0.01),
        Goal("of 200 lengths, of the steps", "share", MANY, at_most=0.01),
    ),
)


def measure(process: str, scratch: Path) -> dict[str, dict[str, float]]:
    """Seconds of a step on its thread, those in which it asks for what is known of graphs, and their share."""
    torch.set_num_threads(1)
    cell = torch.nn.GRUCell(WIDTH[process], WIDTH[process])
    with TierStore(scratch, host_bytes="1MiB", staging_bytes="4MiB") as store:
        if process == LONGEST:
            steps(cell, store, range(NUM_REMEMBERED, 0, -1))
            figures = timed(store, lambda: steps(cell, store, [NUM_REMEMBERED]), num_steps=1)
        else:
            lengths = random.Random(0).sample(range(1, NUM_MANY + 1), NUM_DRAWN)
            steps(cell, store, lengths[:-NUM_MEASURED])
            figures = timed(store, lambda: steps(cell, store, lengths[-NUM_MEASURED:]), num_steps=NUM_MEASURED)
    return {process: figures}


def steps(cell: torch.nn.GRUCell, store: TierStore, lengths: Iterable[int]) -> None:
    for length in lengths:
        state = torch.zeros(cell.hidden_size, cell.hidden_size)
        with tiered_offload(store, min_bytes=0):
            for _ in range(length):
                state = cell(state, state)
        torch.autograd.grad(state.sum(), list(cell.parameters()))


def timed(store: TierStore, run: Callable[[], None], num_steps: int) -> dict[str, float]:
    seconds = 0.0

    def clocked(call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked_call(*arguments: Any) -> Any:
            nonlocal seconds
            began = time.thread_time()
            try:
                return call(*arguments)
            finally:
                seconds += time.thread_time() - began

        return clocked_call

    orders = store._core.learned_orders
    for name in ("learn", "recall", "predict"):
        setattr(orders, name, clocked(getattr(orders, name)))
    began = time.thread_time()
    run()
    step_seconds = time.thread_time() - began
    return {
        "step_seconds": step_seconds / num_steps,
        "orders_seconds": seconds / num_steps,
        "share": seconds / step_seconds,
    }

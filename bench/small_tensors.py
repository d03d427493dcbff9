"""Do many small saved tensors, most of which go to the drive, cost more than a few large ones?

All sizes save the same bytes, and take turns in one process. Those of 4 MiB are moved at the drive's speed. Beside it a
cell of an LSTM over many steps, whose saved tensors are small by themselves, plainly and stored.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path

import torch

from tierstore import TierStore, tiered_offload

from .goals import Goal
from .harness import Benchmark

MOST_OF_LARGE = {1024: 1.1, 512: 1.15, 256: 1.3, 128: 1.4, 96: 1.5, 64: 1.8}
"""By the size of a tensor in KiB."""
LARGE_KIB, SAVED_KIB = 4096, 256 * 1024
ROUNDS, LSTM_STEPS, LSTM_BATCH, LSTM_WIDTH = 3, 500, 64, 256
LARGE, PLAIN_LSTM, LSTM = f"{LARGE_KIB} KiB", "an LSTM, no store", "an LSTM"
SMALL, PLAIN_SMALL = "256 KiB", "256 KiB, no store"
SIZES = {f"{kib} KiB": kib for kib in (LARGE_KIB, *MOST_OF_LARGE)} | {PLAIN_SMALL: 256}
Scope = Callable[[], AbstractContextManager[object]]
OF_LARGE = {
    kib: Goal(
        f"{kib} KiB each, of {LARGE} each",
        "step_seconds",
        f"{kib} KiB",
        at_most=most,
        of=(LARGE,),
        if_missed="a pack, an unpack and a copy for each tensor",
    )
    for kib, most in MOST_OF_LARGE.items()
}

BENCHMARK = Benchmark(
    name="small_tensors",
    question="A step whose saved tensors mostly go to the drive, by the size of a tensor",
    variants=(*SIZES, PLAIN_LSTM, LSTM),
    processes={"by turns": (*SIZES, PLAIN_LSTM, LSTM)},
    plotted=("step_seconds",),
    goals=(
        *OF_LARGE.values(),
        Goal("CPU of all threads, down", "forward_cpu_microseconds", SMALL, at_most=100, beyond=PLAIN_SMALL),
        Goal("CPU of all threads, up", "backward_cpu_microseconds", SMALL, at_most=120, beyond=PLAIN_SMALL),
        Goal("an LSTM, of no store", "step_seconds", LSTM, at_most=1.4, of=(PLAIN_LSTM,)),
    ),
)


def measure(process: str, scratch: Path) -> dict[str, dict[str, float]]:
    return by_turns(scratch, BENCHMARK.variants)


def by_turns(scratch: Path, variants: Sequence[str]) -> dict[str, dict[str, float]]:
    """Seconds of a step, medians after the first round, the bytes that it spilled, and the CPU time of all threads for
    a saved tensor: down, in forward, and up, in backward."""
    torch.set_num_threads(1)
    cell = torch.nn.LSTMCell(LSTM_WIDTH, LSTM_WIDTH)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    with TierStore(scratch, host_bytes="32MiB") as store:
        for _ in range(ROUNDS + 1):
            for name in variants:
                spilled_bytes, began = store.stats().spilled_bytes, time.perf_counter()
                scope = nullcontext if "no store" in name else lambda: tiered_offload(store)
                times = step_of_size(SIZES[name], scope) if name in SIZES else step_of_lstm(cell, scope)
                times["step_seconds"] = time.perf_counter() - began
                found[name].append(times | {"spilled_bytes": store.stats().spilled_bytes - spilled_bytes})
    return {
        name: {figure: statistics.median(each[figure] for each in rounds[1:]) for figure in rounds[0]}
        for name, rounds in found.items()
    }


def step_of_size(kib: int, scope: Scope) -> dict[str, float]:
    value = leaf = torch.rand(kib * 256).requires_grad_()
    clocks = [time.process_time()]
    with scope():
        for _ in range(SAVED_KIB // kib):
            value = value.sin()
    clocks.append(time.process_time())
    torch.autograd.grad(value.sum(), leaf)
    clocks.append(time.process_time())
    each = [(after - before) * 1e6 * kib / SAVED_KIB for before, after in pairwise(clocks)]
    return dict(zip(("forward_cpu_microseconds", "backward_cpu_microseconds"), each, strict=True))


def step_of_lstm(cell: torch.nn.LSTMCell, scope: Scope) -> dict[str, float]:
    state = torch.zeros(LSTM_BATCH, LSTM_WIDTH), torch.zeros(LSTM_BATCH, LSTM_WIDTH)
    with scope():
        for _ in range(LSTM_STEPS):
            state = cell(torch.randn(LSTM_BATCH, LSTM_WIDTH), state)
    torch.autograd.grad(state[0].square().sum(), list(cell.parameters()))
    return {}

"""Do many small saved tensors, most of which go to the drive, cost more than a few large ones?

All sizes save the same bytes, and take turns in one process. Those of 4 MiB are moved at the drive's speed. Beside it a
cell of an LSTM over many steps, whose saved tensors are small by themselves, plainly and stored.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from tierstore import TierStore, tiered_offload

from .goals import Goal
from .harness import Benchmark

MOST_OF_LARGE = {1024: 1.1, 512: 1.15, 256: 1.3, 128: 1.6, 96: 1.8, 64: 2.0}
"""By the size of a tensor in KiB."""
LARGE_KIB, SAVED_KIB = 4096, 256 * 1024
ROUNDS, LSTM_STEPS, LSTM_BATCH, LSTM_WIDTH = 3, 500, 64, 256
LARGE, PLAIN_LSTM, LSTM = f"{LARGE_KIB} KiB", "an LSTM, no store", "an LSTM"
SIZES = {f"{kib} KiB": kib for kib in (LARGE_KIB, *MOST_OF_LARGE)}
Scope = Callable[[], AbstractContextManager[object]]

BENCHMARK = Benchmark(
    name="small_tensors",
    question="A step whose saved tensors mostly go to the drive, by the size of a tensor",
    variants=(*SIZES, PLAIN_LSTM, LSTM),
    processes={"by turns": (*SIZES, PLAIN_LSTM, LSTM)},
    goals=(
        *(
            Goal(f"{kib} KiB each, of {LARGE} each", "step_seconds", f"{kib} KiB", at_most=most, of=(LARGE,))
            for kib, most in MOST_OF_LARGE.items()
        ),
        Goal("an LSTM, of no store", "step_seconds", LSTM, at_most=1.4, of=(PLAIN_LSTM,)),
    ),
)


def measure(process: str, scratch: Path) -> dict[str, dict[str, float]]:
    """Seconds of a step, medians after the first round, and the bytes that it spilled."""
    torch.set_num_threads(1)
    cell = torch.nn.LSTMCell(LSTM_WIDTH, LSTM_WIDTH)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in BENCHMARK.variants}
    with TierStore(scratch, host_bytes="32MiB") as store:
        for _ in range(ROUNDS + 1):
            for name in BENCHMARK.variants:
                spilled_bytes, began = store.stats().spilled_bytes, time.perf_counter()
                scope = nullcontext if name == PLAIN_LSTM else lambda: tiered_offload(store)
                if name in SIZES:
                    step_of_size(SIZES[name], scope)
                else:
                    step_of_lstm(cell, scope)
                found[name].append((time.perf_counter() - began, store.stats().spilled_bytes - spilled_bytes))
    return {name: _median(rounds[1:]) for name, rounds in found.items()}


def step_of_size(kib: int, scope: Scope) -> None:
    value = leaf = torch.rand(kib * 256).requires_grad_()
    with scope():
        for _ in range(SAVED_KIB // kib):
            value = value.sin()
    torch.autograd.grad(value.sum(), leaf)


def step_of_lstm(cell: torch.nn.LSTMCell, scope: Scope) -> None:
    state = torch.zeros(LSTM_BATCH, LSTM_WIDTH), torch.zeros(LSTM_BATCH, LSTM_WIDTH)
    with scope():
        for _ in range(LSTM_STEPS):
            state = cell(torch.randn(LSTM_BATCH, LSTM_WIDTH), state)
    torch.autograd.grad(state[0].square().sum(), list(cell.parameters()))


def _median(rounds: list[tuple[float, int]]) -> dict[str, float]:
    seconds, spilled_bytes = zip(*rounds, strict=True)
    return {"step_seconds": statistics.median(seconds), "spilled_bytes": statistics.median(spilled_bytes)}

"""What does a trace cost? Steps with and without one, by turns, of one model over one store.

A byte-level transformer, forward and backward on the CPU. Steps with `trace=` in the scope and without it take turns,
so both are of the same minutes of the same machine. The ratios are those of the medians: of the time, and of the CPU
time of the process, which has the thread that writes the file in it, and tells more on a machine in use.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from tierstore import TierStore, tiered_offload
from tierstore.demo.model import ByteTransformer, ModelShape, random_batch

from .goals import Goal
from .harness import Benchmark, main_of_one_variant

SHAPE = ModelShape(layers=6, width=192, heads=3, context=128)
BATCH = 8
PAIRS_OF_STEPS = 30
HOST_BYTES = {"all in memory": 2 * 2**30, "most on disk": 16 * 2**20}

BENCHMARK = Benchmark(
    name="trace_cost",
    question="What a trace adds to a training step",
    variants=tuple(HOST_BYTES),
    compare="none",
    rounds=1,  # each figure is a median of pairs
    settings={"model": vars(SHAPE), "batch": BATCH, "pairs_of_steps": PAIRS_OF_STEPS},
    goals=tuple(
        Goal(f"{what} of a traced step, {variant}, of an untraced one's", figure, variant, at_most=1.02)
        for variant in HOST_BYTES
        for what, figure in (("time", "time_ratio"), ("CPU time", "cpu_time_ratio"))
    ),
)


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Medians of each kind of step, without the first pair, and their ratios."""
    torch.set_num_threads(1)  # several would spin at their barriers, and CPU time would count that
    torch.manual_seed(0)
    model = ByteTransformer(SHAPE)
    corpus = torch.randint(256, (2**16,), dtype=torch.uint8)
    batch = random_batch(corpus, BATCH, SHAPE.context, torch.Generator().manual_seed(0))
    file = scratch / "trace.jsonl"
    steps: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with TierStore(scratch, host_bytes=HOST_BYTES[variant], codec="none") as store:
        for number in range(2 * PAIRS_OF_STEPS):
            is_traced = number % 4 in (1, 2)  # neither kind always comes after the other
            started, cpu_started = time.perf_counter(), time.process_time()
            with tiered_offload(store, trace=file if is_traced else None):
                loss = model(*batch)
            loss.backward()
            seconds = time.perf_counter() - started
            model.zero_grad()
            store.flush()  # and the trace is written: that is CPU time too
            steps[is_traced].append((seconds, time.process_time() - cpu_started))
    (traced, traced_cpu), (untraced, untraced_cpu) = (
        map(statistics.median, zip(*steps[kind][1:], strict=True)) for kind in (True, False)
    )
    return {
        "traced_step_seconds": traced,
        "untraced_step_seconds": untraced,
        "time_ratio": traced / untraced,
        "cpu_time_ratio": traced_cpu / untraced_cpu,
        "trace_bytes": file.stat().st_size / PAIRS_OF_STEPS,
    }


if __name__ == "__main__":
    main_of_one_variant(measure)

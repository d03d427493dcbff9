"""What does a training step cost, in time and in memory, with saved tensors kept, moved away or recomputed?

A byte-level transformer on the CPU. The store may hold a fraction of what the plain step saves. Memory is anonymous and
shared memory added at its peak, see `tierstore.demo.memory`. glibc keeps much of what is freed, so the store runs a
second time with `return_memory="always"`. With the disk tier in a daemon, memory is the trainer's.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tierstore import TierStore, tiered_offload
from tierstore.demo.memory import PeakHostMemory
from tierstore.demo.model import ByteTransformer, ModelShape

from .harness import Benchmark
from .parties import daemon
from .peers import checkpoint_blocks, file_per_tensor, save_on_cpu
from .trainings import Figures, Forward, Run, text_training, timed_step

SHAPE = ModelShape(layers=4, width=256, heads=4, context=512)
BATCH = 12
STEPS = 4
HOST_BYTES = 64 * 2**20
STORES = {"tierstore": "auto", "tierstore, freed memory returned": "always"}
SIDECAR, FILES, ON_CPU, CHECKPOINT = "tierstore, daemon", "file per tensor", "save_on_cpu", "checkpoint"

BENCHMARK = Benchmark(
    name="training_step",
    question="One training step of a transformer on the CPU: time and peak memory",
    variants=("plain", *STORES, SIDECAR, FILES, ON_CPU, CHECKPOINT),
    plotted=("step_seconds", "peak_memory_bytes"),
)


@contextmanager
def prepared(variant: str, model: ByteTransformer, scratch: Path) -> Iterator[Forward]:
    if variant in STORES:
        with TierStore(scratch, host_bytes=HOST_BYTES, return_memory=STORES[variant]) as store:
            yield lambda: tiered_offload(store)
        return
    if variant == SIDECAR:
        with daemon(scratch) as served, TierStore.connect(served.socket, host_bytes=HOST_BYTES) as store:
            yield lambda: tiered_offload(store)
        return
    if variant == CHECKPOINT:
        checkpoint_blocks(model.blocks)
    yield {FILES: lambda: file_per_tensor(scratch), ON_CPU: save_on_cpu}.get(variant, nullcontext)


def measure(variant: str, scratch: Path) -> Figures:
    """The median step after the first, the peak over all of them, and the last loss, which all must share."""
    model, loss_of, optimizer = text_training(SHAPE, BATCH)
    with PeakHostMemory() as host, prepared(variant, model, scratch) as forward:
        steps = [timed_step(loss_of, optimizer, Run(forward)) for _ in range(STEPS)]
    return {
        "step_seconds": statistics.median(step["step_seconds"] for step in steps[1:]),
        "peak_memory_bytes": host.added_bytes,
        "last_loss": steps[-1]["last_loss"],
    }

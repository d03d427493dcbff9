"""What does a training step cost, in time and in memory, with saved tensors kept, moved away or recomputed?

A byte-level transformer, forward, backward and optimizer, on the CPU. The store may hold a fraction of what the
plain step saves. Memory is anonymous and shared memory added at its peak, see `tierstore.demo.memory`.

glibc keeps much of what is freed for later, which is faster and larger than what the step needs. So the store runs a
second time with `return_memory="always"`. Nothing else is set.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from tierstore.demo.memory import PeakHostMemory
from tierstore.demo.model import ByteTransformer, ModelShape, random_batch
from tierstore.demo.text import load_text
from tierstore.demo.vector_math import choose_vector_kernels

from .harness import Benchmark, main_of_one_variant
from .peers import checkpoint_blocks, file_per_tensor, save_on_cpu

SHAPE = ModelShape(layers=4, width=256, heads=4, context=512)
BATCH = 12
STEPS = 4
HOST_BYTES = 64 * 2**20

BENCHMARK = Benchmark(
    name="training_step",
    question="One training step of a transformer on the CPU: time and peak memory (and beside plain)",
    variants=(
        "plain",
        "tierstore",
        "tierstore, freed memory returned",
        "file per tensor",
        "save_on_cpu",
        "checkpoint",
    ),
    rounds=1,  # medians of three steps in one process; how processes differ is not shown
    settings={"model": vars(SHAPE), "batch": BATCH, "steps": STEPS, "tierstore_host_bytes": HOST_BYTES},
    plotted=("step_seconds", "peak_memory_bytes"),
)

Forward = Callable[[], AbstractContextManager[object]]
Opened = AbstractContextManager[Forward]


def plain(model: ByteTransformer, scratch: Path) -> Opened:
    return nullcontext(nullcontext)


def with_tierstore(model: ByteTransformer, scratch: Path, return_memory: str = "auto") -> Opened:
    from tierstore import TierStore, tiered_offload

    @contextmanager
    def opened() -> Iterator[Forward]:
        with TierStore(scratch, host_bytes=HOST_BYTES, return_memory=return_memory) as store:
            yield lambda: tiered_offload(store)

    return opened()


def with_memory_returned(model: ByteTransformer, scratch: Path) -> Opened:
    return with_tierstore(model, scratch, "always")


def with_files(model: ByteTransformer, scratch: Path) -> Opened:
    return nullcontext(lambda: file_per_tensor(scratch))


def with_save_on_cpu(model: ByteTransformer, scratch: Path) -> Opened:
    return nullcontext(save_on_cpu)


def with_checkpoint(model: ByteTransformer, scratch: Path) -> Opened:
    checkpoint_blocks(model.blocks)
    return nullcontext(nullcontext)


VARIANTS = dict(
    zip(
        BENCHMARK.variants,
        (plain, with_tierstore, with_memory_returned, with_files, with_save_on_cpu, with_checkpoint),
        strict=True,
    )
)


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """The median step after the first, the peak over all of them, and the last loss, which all must share."""
    choose_vector_kernels()
    torch.manual_seed(0)
    model = ByteTransformer(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = torch.frombuffer(bytearray(load_text(None, SHAPE.context + 1)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    batches = [random_batch(corpus, BATCH, SHAPE.context, generator) for _ in range(STEPS)]
    prepared = VARIANTS[variant](model, scratch)
    seconds = []
    with PeakHostMemory() as host, prepared as forward:
        for batch in batches:
            started = time.perf_counter()
            with forward():
                loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
    return {
        "step_seconds": statistics.median(seconds[1:]),
        "peak_memory_bytes": host.added_bytes,
        "last_loss": loss.item(),
    }


if __name__ == "__main__":
    main_of_one_variant(measure)

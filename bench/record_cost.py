"""What does a record cost in CPU time each way, whatever its size, beyond moving its bytes?

As many bytes in short records as in long ones would hide it, so two sizes are measured, both of which live in extents.
Records are put and flushed, then each is got once, prefetched some before it is needed and dropped at once, as in
backward. The floor moves the same bytes by O_DIRECT, in as many threads as the store has transfers at the device.

A third variant saves tensors of 32 bytes, each by one operation of a graph, with `host_bytes=0, min_bytes=0`; beside it
are hooks that clone what is saved, and `save_on_cpu`. What such a step takes without hooks is taken off.

CPU time is that of all threads of the process. Passes of store and floor alternate; the first of each is left out,
and in it every record is compared with what was put.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tierstore import TierStore, tiered_offload
from tierstore.residency.handle import Handle

from .disk_throughput import LOOKAHEAD, raw_device
from .harness import Benchmark, main_of_one_variant

RECORDS = {"1,024 of 256 KiB": (1024, 256 * 2**10), "128 of 4 MiB": (128, 4 * 2**20)}
PASSES = 6
TINY = "graphs of 500 of 32 bytes"
NUM_TINY = 500
NUM_STEPS = 20

BENCHMARK = Benchmark(
    name="record_cost",
    question="CPU time of a record on its way down and up, beside the same bytes by O_DIRECT",
    variants=(*RECORDS, TINY),
    compare="none",
    rounds=1,  # each figure is a median of passes
    settings={"records": RECORDS, "passes": PASSES, "tiny": NUM_TINY, "steps": NUM_STEPS},
    plotted=("put_cpu_microseconds", "raw_write_cpu_microseconds", "get_cpu_microseconds", "raw_read_cpu_microseconds"),
)


class Passes:
    """Moves a set of incompressible records down and up, as often as it is told to.

    Args:
        store: where to; keeps nothing in memory.
        num_records: in the set.
        record_bytes: of each.
    """

    def __init__(self, store: TierStore, num_records: int, record_bytes: int) -> None:
        source = numpy.random.default_rng(0)
        self.tensors = [torch.from_numpy(source.integers(0, 2**63, record_bytes // 8)) for _ in range(num_records)]
        self._store = store
        self._handles: dict[int, Handle] = {}

    def put(self) -> None:
        """All of them; returns when they are on disk."""
        self._handles = {number: self._store.put(tensor) for number, tensor in enumerate(self.tensors)}
        self._store.flush()

    def get(self, look: Callable[[int, Tensor], None] = lambda number, tensor: None) -> None:
        """Each once, for `look`; returns when what they took is free again."""
        for number in range(len(self.tensors)):
            ahead = range(number, min(number + LOOKAHEAD, len(self.tensors)))
            self._store.prefetch(self._handles[each] for each in ahead)
            look(number, self._store.get(self._handles.pop(number)))
        self._store.flush()

    def compare(self, number: int, got: Tensor) -> None:
        """Raises RuntimeError if a record is not what was put."""
        if not torch.equal(got, self.tensors[number]):
            raise RuntimeError(f"record {number} did not come back as it was")


def cpu_microseconds(move: Callable[[], None], num_records: int) -> float:
    """Of all threads of the process, for each record."""
    before = time.process_time()
    move()
    return 1e6 * (time.process_time() - before) / num_records


def take_steps(scope: Callable[[], AbstractContextManager[object]]) -> None:
    """Of a graph that saves a tiny tensor in each of its nodes."""
    for _ in range(NUM_STEPS):
        value = weight = torch.ones(8, requires_grad=True)
        with scope():
            for _ in range(NUM_TINY):
                value = value.sin()
        value.sum().backward()
        if weight.grad is None:
            raise RuntimeError("the step has no gradient")


def measure_tiny(scratch: Path) -> dict[str, float]:
    """Medians of the passes."""
    torch.set_num_threads(1)
    with TierStore(scratch, host_bytes=0) as store:
        scopes: dict[str, Callable[[], AbstractContextManager[object]]] = {
            "no_hooks": nullcontext,
            "clone_hooks": lambda: saved_tensors_hooks(Tensor.clone, lambda saved: saved),
            "save_on_cpu": save_on_cpu,
            "saved": lambda: tiered_offload(store, min_bytes=0),
        }
        moves = {name: partial(take_steps, scope) for name, scope in scopes.items()}
        laps = [
            {name: cpu_microseconds(move, NUM_TINY * NUM_STEPS) for name, move in moves.items()}
            for _ in range(PASSES + 1)
        ][1:]
    without = statistics.median(lap.pop("no_hooks") for lap in laps)
    return {f"{name}_cpu_microseconds": statistics.median(lap[name] for lap in laps) - without for name in laps[0]}


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Medians of the passes."""
    if variant == TINY:
        return measure_tiny(scratch)
    num_records, record_bytes = RECORDS[variant]
    with (
        raw_device(scratch, num_records, record_bytes) as raw,
        TierStore(scratch, host_bytes=0, codec="none", checksum=True) as store,
    ):
        passes = Passes(store, num_records, record_bytes)
        moves = {"raw_write": raw.spill, "raw_read": raw.restore, "put": passes.put, "get": passes.get}
        raw.spill()
        raw.restore()
        passes.put()
        passes.get(passes.compare)
        laps = [{name: cpu_microseconds(move, num_records) for name, move in moves.items()} for _ in range(PASSES)]
    return {f"{name}_cpu_microseconds": statistics.median(lap[name] for lap in laps) for name in moves}


if __name__ == "__main__":
    main_of_one_variant(measure)

"""Training that does not fit into memory: what does a step cost under a limit that the kernel enforces?

A byte-level transformer whose saved tensors alone exceed a memory cgroup of 1000 MiB. Plain training is killed there,
and is shown so. The floor beside the store is the same training without a limit and without hooks, while a bare
thread moves the bytes that the store moves: what is left then is what the drive and the memory bus take away from
training on these cores, whoever moves the bytes. How many they are is measured first, by a short training with the
store.

All variants run with the same fixed malloc threshold (mallopt(3), M_MMAP_THRESHOLD): glibc keeps freed blocks of up
to 32 MiB for itself otherwise, and what a limited process then holds is a matter of the order of its allocations.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue

import torch

from tierstore.demo.model import ByteTransformer, ModelShape, random_batch
from tierstore.demo.text import load_text

from .cgroup import memory_cgroup
from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .peers import file_per_tensor

SHAPE = ModelShape(layers=12, width=128, heads=2, context=512)
BATCH = 24
STEPS = 5
WARM_UP_STEPS = 2
PROBE_STEPS = 3
LIMIT_BYTES = 1000 * 2**20
HOST_BYTES = 128 * 2**20
BLOCK_BYTES = 10 * 2**20
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}

VARIANTS = ("unlimited", "plain, limited", "bare mover", "tierstore, limited", "file per tensor, limited")

BENCHMARK = Benchmark(
    name="memory_limit",
    question="A training step under a memory limit of 1000 MiB (and beside unlimited memory)",
    variants=VARIANTS,
    environment=dict.fromkeys(VARIANTS, ENVIRONMENT),
    settings={
        "model": vars(SHAPE),
        "batch": BATCH,
        "steps": STEPS,
        "limit_bytes": LIMIT_BYTES,
        "tierstore_host_bytes": HOST_BYTES,
        "num_threads": torch.get_num_threads(),
    },
    timeout_seconds=300,
    plotted=("step_seconds", "peak_memory_bytes"),
    goals=(
        Goal("plain training does not fit", "out_of_memory_kills", "plain, limited", at_least=1),
        Goal("time of a step", "step_seconds", "tierstore, limited", at_most=1.05, of=("bare mover",)),
        Goal("time of a step", "step_seconds", "tierstore, limited", at_most=1.15, of=("unlimited",)),
        Goal(
            "time of a step",
            "step_seconds",
            "file per tensor, limited",
            at_least=1.7,
            of=("tierstore, limited",),
        ),
        Goal("last loss, bit for bit", "last_loss", "tierstore, limited", equals=1, of=("unlimited",)),
    ),
)

Forward = Callable[[], AbstractContextManager[object]]
Figures = dict[str, float]


def measure(variant: str, scratch: Path) -> Figures:
    """Run the training in a cgroup of its own, and add what the cgroup has seen."""
    moved_bytes = (0, 0)
    if variant == "bare mover":
        probe = train_in_cgroup("tierstore, limited", scratch, PROBE_STEPS, moved_bytes)
        moved_bytes = (int(probe["spilled_bytes"]), int(probe["restored_bytes"]))
    return train_in_cgroup(variant, scratch, STEPS, moved_bytes)


def train_in_cgroup(variant: str, scratch: Path, steps: int, moved_bytes: tuple[int, int]) -> Figures:
    """The figures of one training; of one that was killed, what is known.

    Raises:
        CgroupError: there can be no memory cgroup.
        RuntimeError: the training failed in any other way.
    """
    request = json.dumps([variant, str(scratch), steps, *moved_bytes])
    with memory_cgroup() as cgroup:
        if variant.endswith(", limited"):
            cgroup.limit(LIMIT_BYTES)
        command = cgroup.command([sys.executable, "-m", "bench.memory_limit", "--train", request])
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        kills = cgroup.num_oom_kills
        seen: Figures = {"peak_memory_bytes": cgroup.peak_bytes, "out_of_memory_kills": kills}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]) | seen
    if done.returncode == -signal.SIGKILL and kills:
        return seen
    raise RuntimeError(f"{variant}: exit code {done.returncode}")


def train(variant: str, scratch: Path, steps: int, written_bytes: int, read_bytes: int) -> Figures:
    """In the cgroup: the median step after the first ones, and the last loss, which all variants must share."""
    torch.manual_seed(0)
    model = ByteTransformer(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = torch.frombuffer(bytearray(load_text(None, SHAPE.context + 1)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    prepared = {
        "bare mover": lambda: with_mover(scratch, written_bytes, read_bytes),
        "tierstore, limited": lambda: with_tierstore(scratch),
        "file per tensor, limited": lambda: nullcontext(Run(lambda: file_per_tensor(scratch))),
    }.get(variant, lambda: nullcontext(Run()))
    seconds, figures = [], []
    with prepared() as run:
        for _ in range(steps):
            batch = random_batch(corpus, BATCH, SHAPE.context, generator)
            started = time.perf_counter()
            with run.forward():
                loss = model(*batch)
            run.between()
            loss.backward()
            run.after()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
            figures.append(run.figures())
    warm = slice(min(WARM_UP_STEPS, steps - 1), None)
    return {
        "step_seconds": statistics.median(seconds[warm]),
        "last_loss": loss.item(),
        **{name: statistics.median(each[name] for each in figures[warm]) for name in figures[0]},
    }


class Run:
    """What a variant does around the parts of a step."""

    def __init__(self, forward: Forward = nullcontext) -> None:
        self.forward = forward

    def between(self) -> None:
        """After forward."""

    def after(self) -> None:
        """After backward."""

    def figures(self) -> Figures:
        """Of the step that has just ended."""
        return {}


class StoreRun(Run):
    """With a store: what it moved and where training waited for it, step by step."""

    def __init__(self, store: object, forward: Forward) -> None:
        super().__init__(forward)
        self._store = store
        self._last: Figures = {}

    def figures(self) -> Figures:
        """See `Run`."""
        stats = self._store.stats()
        totals = {
            "spilled_bytes": stats.spilled_bytes,
            "restored_bytes": stats.restored_bytes,
            "waited_seconds": sum(stats.stall_seconds.values()),
        }
        step = {name: total - self._last.get(name, 0) for name, total in totals.items()}
        self._last = totals
        return step


@contextmanager
def with_tierstore(scratch: Path) -> Iterator[Run]:
    from tierstore import TierStore, tiered_offload

    with TierStore(scratch, host_bytes=HOST_BYTES) as store:
        yield StoreRun(store, lambda: tiered_offload(store))


class MoverRun(Run):
    """A bare thread that writes so many bytes in forward and reads so many in backward, O_DIRECT, one buffer."""

    def __init__(self, scratch: Path, written_bytes: int, read_bytes: int) -> None:
        super().__init__(self._forward)
        self._file = os.open(scratch, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, max(written_bytes, read_bytes) + BLOCK_BYTES)
        self._buffer = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._buffer.write(os.urandom(BLOCK_BYTES))
        self._written_bytes, self._read_bytes = written_bytes, read_bytes
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._waited_seconds = 0.0
        self._thread = threading.Thread(target=self._move)
        self._thread.start()

    def between(self) -> None:
        """See `Run`."""
        self._orders.put(self._read)

    def after(self) -> None:
        """See `Run`: the step ends when the bytes have been moved."""
        self._orders.put(self._idle.set)
        started = time.perf_counter()
        self._idle.wait()
        self._idle.clear()
        self._waited_seconds = time.perf_counter() - started

    def figures(self) -> Figures:
        """See `Run`."""
        return {
            "spilled_bytes": self._written_bytes,
            "restored_bytes": self._read_bytes,
            "waited_seconds": self._waited_seconds,
        }

    def close(self) -> None:
        """End the thread."""
        self._orders.put(None)
        self._thread.join()
        os.close(self._file)

    def _forward(self) -> AbstractContextManager[object]:
        self._orders.put(self._write)
        return nullcontext()

    def _move(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

    def _write(self) -> None:
        for offset in range(0, self._written_bytes, BLOCK_BYTES):
            os.pwrite(self._file, self._buffer, offset)

    def _read(self) -> None:
        for offset in range(0, self._read_bytes, BLOCK_BYTES):
            os.preadv(self._file, [self._buffer], offset)


@contextmanager
def with_mover(scratch: Path, written_bytes: int, read_bytes: int) -> Iterator[Run]:
    run = MoverRun(scratch, written_bytes, read_bytes)
    try:
        yield run
    finally:
        run.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        print(json.dumps(train(*json.loads(sys.argv[2]))))
    else:
        main_of_one_variant(measure)

"""Training that does not fit into memory: what does a step cost under a limit that the kernel enforces?

A byte-level transformer whose saved tensors alone exceed a memory cgroup of 1000 MiB. Plain training is killed there,
and is shown so. The floor beside the store is the same training without a limit and without hooks, while bare
threads move and checksum the bytes that the store moves: what is left then is what the drive and the memory bus take
away from training on these cores, whoever moves the bytes. How many they are is seen in the store's own first steps.

A shared machine is twice as fast in one minute as in the next. So a variant is measured beside those that it is
compared with: each trains in a process of its own, in a cgroup of its own, but they take turns, a step each, whoever
went first goes last the next time, and the ratio of the steps of each turn counts.

Beside the steps is told what keeps a training on all cores from them: the CPU time of the threads that move bytes, and
how long the thread that trains was ready to run while others had the cores.

Nothing is set that a user would not set: glibc keeps freed blocks of up to 32 MiB for itself, and the store has it
return them when memory is short (`return_memory="auto"`, docs/how_to/memory_on_cpu.md).

At 700 MiB the store runs beside plain training that may use swap on the same drive: what the kernel does by itself.
That takes root, for swapon(8).
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from tierstore.demo.model import ByteTransformer, ModelShape, random_batch
from tierstore.demo.text import load_text
from tierstore.demo.vector_math import choose_vector_kernels
from tierstore.disk.location import record_checksum

from .cgroup import CgroupError, MemoryCgroup, memory_cgroup
from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .peers import file_per_tensor
from .threads import thread_times

SHAPE = ModelShape(layers=12, width=128, heads=2, context=512)
BATCH = 24
HOST_BYTES = 128 * 2**20
BLOCK_BYTES = 10 * 2**20
IN_FLIGHT = 4
SWAP_FILE_BYTES = 4 * 2**30

UNLIMITED, KILLED, MOVER = "unlimited", "plain, limited", "bare mover"
STORE, FILES = "tierstore, limited", "file per tensor, limited"
TIGHT, SWAP = "tierstore, 700 MiB", "plain with swap, 700 MiB"
LIMITS_BYTES = {KILLED: 1000 * 2**20, STORE: 1000 * 2**20, FILES: 1000 * 2**20, TIGHT: 700 * 2**20, SWAP: 700 * 2**20}
BY_TURNS = "by turns"
TOGETHER = {
    BY_TURNS: (TIGHT, STORE, MOVER, UNLIMITED),
    KILLED: (KILLED,),
    FILES: (FILES, STORE, UNLIMITED),
    SWAP: (SWAP, TIGHT),
}
"""What takes turns in each process of the benchmark; a variant's steps are compared with those of the ones after it."""
WARM_UP_STEPS = {BY_TURNS: 2, KILLED: 2, FILES: 1, SWAP: 1}
TURNS = {BY_TURNS: 4, KILLED: 4, FILES: 1, SWAP: 2}
"""After the warm-up. Few of both where no goal is near: a turn with files takes 12 s."""

BENCHMARK = Benchmark(
    name="memory_limit",
    question="A training step under memory limits of 1000 and 700 MiB",
    variants=(UNLIMITED, KILLED, MOVER, STORE, FILES, TIGHT, SWAP),
    processes={BY_TURNS: TOGETHER[BY_TURNS]},
    rounds=1,
    compare="none",
    settings={
        "model": vars(SHAPE),
        "batch": BATCH,
        "turns": TURNS,
        "limits_bytes": LIMITS_BYTES,
        "tierstore_host_bytes": HOST_BYTES,
        "num_threads": torch.get_num_threads(),
    },
    timeout_seconds=600,
    plotted=("step_seconds", "peak_memory_bytes"),
    goals=(
        Goal("plain training does not fit", "out_of_memory_kills", KILLED, at_least=1),
        Goal("step, of the bare mover's", "step_to_bare_mover", STORE, at_most=1.05),
        Goal("step, of that with unlimited memory", "step_to_unlimited", STORE, at_most=1.15),
        Goal("step, of the store's", "step_to_tierstore", FILES, at_least=1.7),
        Goal("last loss, bit for bit", "last_loss", STORE, equals=1, of=(UNLIMITED,)),
        Goal("last loss at 700 MiB, bit for bit", "last_loss", TIGHT, equals=1, of=(UNLIMITED,)),
        Goal("step with the kernel's swap, of the store's at 700 MiB", "step_to_tierstore", SWAP, at_least=3),
    ),
)

Forward = Callable[[], AbstractContextManager[object]]
Figures = dict[str, float]


def measure(process: str, scratch: Path) -> Figures | dict[str, Figures]:
    """Medians of the steps of the variants that the process is about, and of their ratios within each turn."""
    with ExitStack() as stack:
        trainings = [stack.enter_context(training(name, scratch)) for name in TOGETHER[process]]
        for _ in range(WARM_UP_STEPS[process]):
            for each in trainings:
                each.step()
        turns = []
        for turn in range(TURNS[process]):
            order = trainings if turn % 2 else trainings[::-1]
            turns.append({each.variant: each.step() for each in order})
            if not trainings[0].is_running:
                break
        found = {
            each.variant: each.figures([steps[each.variant] for steps in turns])
            | ratios(each.variant, TOGETHER[process][place:], turns)
            for place, each in enumerate(trainings, start=1)
        }
    return found if process in BENCHMARK.processes else found[process]


def ratios(variant: str, others: Sequence[str], turns: list[dict[str, Figures]]) -> Figures:
    """Medians of how long the variant's steps took, of those of each of the others in the same turn."""
    return {
        f"step_to_{name.split(',')[0].replace(' ', '_')}": statistics.median(
            steps[variant]["step_seconds"] / steps[name]["step_seconds"] for steps in turns
        )
        for name in others
    }


class Training:
    """One training in a process and a cgroup of its own, which takes a step when it is told to.

    Args:
        variant: which.
        process: it.
        cgroup: where it runs.
    """

    def __init__(self, variant: str, process: subprocess.Popen[str], cgroup: MemoryCgroup) -> None:
        self.variant = variant
        self.is_running = True
        self._process = process
        self._cgroup = cgroup

    @property
    def exit_code(self) -> int | None:
        """None: it runs, as far as is known."""
        return self._process.returncode

    def step(self) -> Figures:
        """Have it take one step; returns that step's figures, none if the kernel ended it for want of memory.

        Raises:
            RuntimeError: it ended in any other way.
        """
        if not self.is_running:
            return {}
        try:
            print("step", file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self.is_running = False
        if self._process.wait() != -signal.SIGKILL or not self._cgroup.num_oom_kills:
            raise RuntimeError(f"{self.variant}: exit code {self._process.returncode}")
        return {}

    def figures(self, steps: list[Figures]) -> Figures:
        """Medians of its steps, and what its cgroup has seen. A step in which the kernel ended it has no figures."""
        steps = [step for step in steps if step]
        names = dict.fromkeys(name for step in steps for name in step)
        seen = {"peak_memory_bytes": self._cgroup.peak_bytes, "out_of_memory_kills": self._cgroup.num_oom_kills}
        medians = {name: statistics.median(step[name] for step in steps) for name in names}
        return medians | ({"last_loss": steps[-1]["last_loss"]} if names else {}) | seen


@contextmanager
def training(variant: str, scratch: Path) -> Iterator[Training]:
    """Start one; the mover's after a short training with the store, to see what that moves.

    Raises:
        CgroupError: there can be no memory cgroup.
    """
    written_bytes = read_bytes = 0
    if variant == MOVER:
        with training(STORE, scratch) as probe:
            moved = [probe.step() for _ in range(WARM_UP_STEPS[BY_TURNS] + 1)][-1]
        written_bytes, read_bytes = int(moved["spilled_bytes"]), int(moved["restored_bytes"])
    request = json.dumps([variant, str(scratch), written_bytes, read_bytes])
    with ExitStack() as around:
        if variant == SWAP:
            around.enter_context(swap_file(scratch))
        cgroup = around.enter_context(memory_cgroup())
        if variant in LIMITS_BYTES:
            cgroup.limit(LIMITS_BYTES[variant], with_swap=variant == SWAP)
        command = cgroup.command([sys.executable, "-m", "bench.memory_limit", "--train", request])
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield Training(variant, process, cgroup)


@contextmanager
def swap_file(folder: Path) -> Iterator[None]:
    """Have the kernel swap to a file on the drive that is measured.

    Raises:
        CgroupError: it cannot be had; that takes root.
    """
    file = folder / "swap"
    try:
        with open(file, "wb") as opened:
            os.fchmod(opened.fileno(), 0o600)
            os.posix_fallocate(opened.fileno(), 0, SWAP_FILE_BYTES)
        for command in ("mkswap", "swapon"):
            subprocess.run([command, str(file)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CgroupError(f"swap on a file cannot be had here ({error}); run this as root") from error
    try:
        yield
    finally:
        subprocess.run(["swapoff", str(file)], check=True)
        file.unlink()


def train(variant: str, scratch: Path, written_bytes: int, read_bytes: int) -> None:
    """In the cgroup: one step for each line of standard input, a line of figures for each step."""
    choose_vector_kernels()
    torch.manual_seed(0)
    model = ByteTransformer(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = torch.frombuffer(bytearray(load_text(None, SHAPE.context + 1)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    prepared: dict[str, Callable[[], AbstractContextManager[Run]]] = {
        MOVER: lambda: with_mover(scratch, written_bytes, read_bytes),
        STORE: lambda: with_tierstore(scratch),
        TIGHT: lambda: with_tierstore(scratch),
        FILES: lambda: nullcontext(Run(lambda: file_per_tensor(scratch))),
    }
    with prepared.get(variant, lambda: nullcontext(Run()))() as run:
        for _ in sys.stdin:
            batch = random_batch(corpus, BATCH, SHAPE.context, generator)
            before, started = thread_times(), time.perf_counter()
            with run.forward():
                loss = model(*batch)
            run.between()
            loss.backward()
            run.after()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - started
            figures = {"step_seconds": seconds, "last_loss": loss.item()} | thread_times().since(before)
            print(json.dumps(figures | run.figures()), flush=True)


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

    def __init__(self, store: Any, forward: Forward) -> None:
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
    """Bare movement beside training: so many bytes written in forward and read in backward, with no hooks.

    Each block is written after a pass over it that takes its checksum, and read before one, as the store does it.

    O_DIRECT, from and to buffers that are used again, as many transfers in flight as the store's engine has lanes
    (with one, a drive that is slow to answer would have the floor wait where the store does not).
    """

    def __init__(self, scratch: Path, written_bytes: int, read_bytes: int) -> None:
        super().__init__(self._forward)
        self._file = os.open(scratch, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, max(written_bytes, read_bytes) + BLOCK_BYTES)
        self._written_bytes, self._read_bytes = written_bytes, read_bytes
        self._jobs: list[Future[object]] = []
        self._buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(IN_FLIGHT):
            buffer = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            buffer.write(os.urandom(BLOCK_BYTES))
            self._buffers.put(buffer)
        self._threads = ThreadPoolExecutor(IN_FLIGHT)
        self._waited_seconds = 0.0

    def _forward(self) -> AbstractContextManager[object]:
        self._begin(self._write, self._written_bytes)
        return nullcontext()

    def between(self) -> None:
        """See `Run`."""
        self._begin(self._read, self._read_bytes)

    def after(self) -> None:
        """See `Run`: the step ends when the bytes have been moved."""
        started = time.perf_counter()
        for job in self._jobs:
            job.result()
        self._jobs.clear()
        self._waited_seconds = time.perf_counter() - started

    def figures(self) -> Figures:
        """See `Run`."""
        return {
            "spilled_bytes": self._written_bytes,
            "restored_bytes": self._read_bytes,
            "waited_seconds": self._waited_seconds,
        }

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
        os.close(self._file)

    def _write(self, buffer: mmap.mmap, offset: int) -> int:
        record_checksum(memoryview(buffer), 0)
        return os.pwrite(self._file, buffer, offset)

    def _read(self, buffer: mmap.mmap, offset: int) -> int:
        num_bytes = os.preadv(self._file, [buffer], offset)
        record_checksum(memoryview(buffer), 0)
        return num_bytes

    def _begin(self, transfer: Callable[[mmap.mmap, int], int], num_bytes: int) -> None:
        def run(offset: int) -> None:
            buffer = self._buffers.get()
            if transfer(buffer, offset) != BLOCK_BYTES:
                raise RuntimeError("a transfer was cut short")
            self._buffers.put(buffer)

        self._jobs += [self._threads.submit(run, offset) for offset in range(0, num_bytes, BLOCK_BYTES)]


@contextmanager
def with_mover(scratch: Path, written_bytes: int, read_bytes: int) -> Iterator[Run]:
    run = MoverRun(scratch, written_bytes, read_bytes)
    try:
        yield run
    finally:
        run.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        variant, scratch, *moved_bytes = json.loads(sys.argv[2])
        train(variant, Path(scratch), *moved_bytes)
    else:
        main_of_one_variant(measure)

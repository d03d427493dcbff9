"""Training that does not fit into memory: what does a step cost under a limit that the kernel enforces?

A byte-level transformer whose saved tensors alone exceed a memory cgroup of 1000 MiB. Plain training is killed there,
and is shown so. The floor is the same training without a limit and without hooks, while bare threads move and checksum
the bytes that the store moves, as its first steps tell. Each trains in a process and a cgroup of its own, but they take
turns, a step each (`parties.py` says why), and the ratio of the steps of each turn counts. Told beside: the CPU time of
the threads that move bytes, and how long the thread that trains was ready to run while others had the cores.

Nothing is set that a user would not set (docs/how_to/memory_on_cpu.md). At 700 MiB the store runs beside plain training
that may use swap on the same drive: what the kernel does by itself. That takes root, for swapon(8).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from tierstore import TierStore, tiered_offload
from tierstore.demo.model import ModelShape
from tierstore.disk.native import THREAD_NAME as NATIVE_THREADS

from .cgroup import CgroupError
from .child import command, serve
from .goals import Goal
from .harness import Benchmark
from .peers import file_per_tensor
from .raw_device import Mover, raw_device
from .trainings import Figures, Run, Training, text_training, timed_step, training, turns_of

SHAPE = ModelShape(layers=12, width=128, heads=2, context=512)
BATCH = 24
HOST_BYTES = 128 * 2**20
BLOCK_BYTES = 10 * 2**20
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
TURNS = {BY_TURNS: 4, KILLED: 4, FILES: 1, SWAP: 4}
"""After the warm-up. Few where no goal is near: a turn with files takes 12 s. Swapping slows down from step to step."""

BENCHMARK = Benchmark(
    name="memory_limit",
    question="A training step under memory limits of 1000 and 700 MiB",
    variants=(UNLIMITED, KILLED, MOVER, STORE, FILES, TIGHT, SWAP),
    processes={BY_TURNS: TOGETHER[BY_TURNS]},
    timeout_seconds=600,
    plotted=("step_seconds", "peak_memory_bytes"),
    goals=(
        Goal("plain training does not fit", "out_of_memory_kills", KILLED, at_least=1),
        Goal("step, of the bare mover's", "step_to_bare_mover", STORE, at_most=1.05),
        Goal("step, of that with unlimited memory", "step_to_unlimited", STORE, at_most=1.08),
        Goal("step at 700 MiB, of that with unlimited memory", "step_to_unlimited", TIGHT, at_most=1.08),
        Goal("step, of the store's", "step_to_tierstore", FILES, at_least=1.7),
        Goal("last loss, bit for bit", "last_loss", STORE, equals=1, of=(UNLIMITED,)),
        Goal("last loss at 700 MiB, bit for bit", "last_loss", TIGHT, equals=1, of=(UNLIMITED,)),
        Goal("step with the kernel's swap, of the store's at 700 MiB", "step_to_tierstore", SWAP, at_least=4.5),
    ),
)


def measure(process: str, scratch: Path) -> Figures | dict[str, Figures]:
    with ExitStack() as stack:
        trainings = {name: stack.enter_context(started(name, scratch)) for name in TOGETHER[process]}
        for each in trainings.values():
            for _ in range(WARM_UP_STEPS[process]):
                each.step()
        turns = turns_of(trainings, TURNS[process])
        found = {
            name: each.figures([steps[name] for steps in turns]) | ratios(name, TOGETHER[process][place:], turns)
            for place, (name, each) in enumerate(trainings.items(), start=1)
        }
    return found if process in BENCHMARK.processes else found[process]


def ratios(variant: str, others: Sequence[str], turns: list[dict[str, Figures]]) -> Figures:
    """Of the turns in which neither had been killed; none where there are none."""
    both = {name: [(turn[variant], turn[name]) for turn in turns if turn[variant] and turn[name]] for name in others}
    return {
        f"step_to_{name.split(',')[0].replace(' ', '_')}": statistics.median(
            one["step_seconds"] / other["step_seconds"] for one, other in pairs
        )
        for name, pairs in both.items()
        if pairs
    }


@contextmanager
def started(variant: str, scratch: Path) -> Iterator[Training]:
    """One training; the mover's after a short one with the store, to see what that moves."""
    moved_bytes = (0, 0)
    if variant == MOVER:
        with started(STORE, scratch) as probe:
            moved = [probe.step() for _ in range(WARM_UP_STEPS[BY_TURNS] + 1)][-1]
        moved_bytes = int(moved["spilled_bytes"]), int(moved["restored_bytes"])
    words = command(__name__, "train", variant, scratch, *moved_bytes)
    with (
        swap_file(scratch) if variant == SWAP else nullcontext(),
        training(variant, words, LIMITS_BYTES.get(variant), with_swap=variant == SWAP) as found,
    ):
        yield found


@contextmanager
def swap_file(folder: Path) -> Iterator[None]:
    """Have the kernel swap to a file on the drive that is measured. Raises CgroupError: it cannot be had; that takes
    root."""
    file = folder / "swap"
    try:
        with open(file, "wb") as opened:
            os.fchmod(opened.fileno(), 0o600)
            os.posix_fallocate(opened.fileno(), 0, SWAP_FILE_BYTES)
        for words in (["mkswap", str(file)], ["swapon", str(file)]):
            subprocess.run(words, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CgroupError(f"swap on a file cannot be had here ({error}); run this as root") from error
    try:
        yield
    finally:
        subprocess.run(["swapoff", str(file)], check=True)
        file.unlink()


# --- in the cgroup ----------------------------------------------------------------------------------------------------


def train(variant: str, scratch: Path, written_bytes: int, read_bytes: int) -> None:
    loss_of, optimizer = text_training(SHAPE, BATCH)
    run = Run()
    with ExitStack() as stack:
        if variant in (STORE, TIGHT):
            run = StoreRun(stack.enter_context(TierStore(scratch, host_bytes=HOST_BYTES)))
        elif variant == MOVER:
            run = stack.enter_context(with_mover(scratch, written_bytes, read_bytes))
        elif variant == FILES:
            run = Run(lambda: file_per_tensor(scratch))

        def step(_: str) -> Figures:
            before = thread_times()
            figures = timed_step(loss_of, optimizer, run)
            times = {name: now - before[name] for name, now in thread_times().items()}
            return figures | times | run.figures()

        serve(step)


def thread_times() -> Figures:
    """What the threads that move bytes have used since they began: those that Python knows of, but for the main one,
    and the store's in C. And how long the main one was ready to run while others had the cores (schedstat in /proc; a
    kernel without it says 0)."""

    def ran_and_waited(thread: int | None) -> tuple[float, float]:
        try:
            ran, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        except OSError:  # it has just ended, or there is no such account
            return 0.0, 0.0
        return int(ran) / 1e9, int(waited) / 1e9

    main = threading.main_thread().native_id
    others = [thread.native_id for thread in threading.enumerate() if thread.native_id != main]
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            if name.read_text().startswith(NATIVE_THREADS):
                others.append(int(name.parent.name))
    return {
        "background_cpu_seconds": sum(ran_and_waited(each)[0] for each in others),
        "core_wait_seconds": ran_and_waited(main)[1],
    }


class StoreRun(Run):
    def __init__(self, store: TierStore) -> None:
        super().__init__(lambda: tiered_offload(store))
        self._store = store
        self._last: Figures = {}

    def figures(self) -> Figures:
        stats = self._store.stats()
        totals = {
            "spilled_bytes": stats.spilled_bytes,
            "restored_bytes": stats.restored_bytes,
            "waited_seconds": sum(stats.stall_seconds.values()),
        }
        step = {name: total - self._last.get(name, 0) for name, total in totals.items()}
        self._last = totals
        return step


class MoverRun(Run):
    """Bare movement beside training, with no hooks: all blocks are written in forward and read in backward."""

    def __init__(self, down: Mover, up: Mover, thread: ThreadPoolExecutor) -> None:
        super().__init__(self._forward)
        self._moves = {"down": down.spill, "up": up.restore}
        self._thread = thread
        self._jobs: list[Future[None]] = []
        self._waited_seconds = 0.0

    def _forward(self) -> AbstractContextManager[object]:
        self._jobs = [self._thread.submit(self._moves["down"])]
        return nullcontext()

    def between(self) -> None:
        self._jobs.append(self._thread.submit(self._moves["up"]))

    def after(self) -> None:
        started = time.perf_counter()
        for job in self._jobs:
            job.result()
        self._waited_seconds = time.perf_counter() - started

    def figures(self) -> Figures:
        return {"waited_seconds": self._waited_seconds}


@contextmanager
def with_mover(scratch: Path, written_bytes: int, read_bytes: int) -> Iterator[Run]:
    """Each block is written after a pass over it that takes its checksum, and read before one, as the store does it."""
    num_written, num_read = (-(-num_bytes // BLOCK_BYTES) for num_bytes in (written_bytes, read_bytes))
    with (
        raw_device(scratch, max(num_written, num_read), BLOCK_BYTES) as space,
        raw_device(scratch, num_written, BLOCK_BYTES, file=space.file, has_checksums=True) as down,
        raw_device(scratch, num_read, BLOCK_BYTES, file=space.file, has_checksums=True) as up,
        ThreadPoolExecutor(1) as thread,
    ):
        yield MoverRun(down, up, thread)

"""What does a training step cost, in time and memory, with saved tensors kept, computed again, moved away or swapped?

The program of README.md, a process for each variant. They take steps by turns (`parties.py` says why), and the ratios
of each turn count. The peak is the most that the process ever had resident, as that program prints it: with Python,
PyTorch and the model. Four train within a limit that the kernel enforces, which does not count the code of libraries;
one of them has swap on the drive. Both take root. Stores have the caching allocator of `native/` where it is built;
plain training has it in one variant, glibc's in the others.
"""

from __future__ import annotations

import resource
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from tierstore import TierStore, tiered_offload

from .child import command, serve
from .goals import Goal
from .harness import Benchmark
from .memory_limit import swap_file
from .peers import checkpoint_blocks
from .trainings import (
    Figures,
    Run,
    Training,
    readme_training,
    timed_step,
    training,
    turns_of,
    use_caching_allocator,
)

HOST_BYTES = 128 * 2**20
LIMIT_BYTES = 1000 * 2**20
WARM_UP_STEPS, TURNS = 2, 4

PLAIN, CACHED, CHECKPOINT = "plain", "plain, caching allocator", "checkpoint"
STORE, ALWAYS, BOTH = "tierstore", "tierstore, always", "tierstore, checkpoint"
SWAP = "plain with swap, limited"
KILLED = ("plain, limited", "checkpoint, limited")
LIMITED = (SWAP, *KILLED, "tierstore, limited")
VARIANTS = (PLAIN, CACHED, CHECKPOINT, STORE, ALWAYS, BOTH, *LIMITED)

BENCHMARK = Benchmark(
    name="training_step",
    question="One step of README's transformer on the CPU: time and peak memory",
    variants=VARIANTS,
    processes={"by turns": VARIANTS},
    timeout_seconds=1800,
    plotted=("step_seconds", "peak_memory_bytes"),
    goals=tuple(
        Goal("last loss, bit for bit", "last_loss", each, equals=1, of=(PLAIN,))
        for each in VARIANTS
        if each not in (PLAIN, *KILLED)
    ),
)


def measure(_: str, scratch: Path) -> dict[str, Figures]:
    with ExitStack() as stack:
        trainings = {each: stack.enter_context(started(each, scratch)) for each in VARIANTS}
        turns = turns_of(trainings, WARM_UP_STEPS + TURNS)[WARM_UP_STEPS:]
    return {each: figures_of(each, turns) for each in VARIANTS}


@contextmanager
def started(variant: str, scratch: Path) -> Iterator[Training]:
    words, swaps = command(__name__, "train", variant, scratch), variant == SWAP
    limit_bytes = LIMIT_BYTES if variant in LIMITED else None
    with swap_file(scratch) if swaps else nullcontext(), training(variant, words, limit_bytes, with_swap=swaps) as each:
        yield each


def figures_of(variant: str, turns: list[dict[str, Figures]]) -> Figures:
    """Medians of the turns, the peak over all of them, and the last loss, which all must share."""
    if not all(turn[variant] for turn in turns):
        return {"out_of_memory_kills": 1}
    seconds = [turn[variant]["step_seconds"] for turn in turns]
    last = turns[-1][variant]
    return {
        "step_seconds": statistics.median(seconds),
        "step_of_plain": statistics.median(
            each / turn[PLAIN]["step_seconds"] for each, turn in zip(seconds, turns, strict=True)
        ),
        "page_faults": statistics.median(turn[variant]["page_faults"] for turn in turns),
        "peak_memory_bytes": last["peak_memory_bytes"],
        "last_loss": last["last_loss"],
    }


# --- in a process of its own ------------------------------------------------------------------------------------------


def train(variant: str, scratch: Path) -> None:
    model, loss_of, optimizer = readme_training()
    if "checkpoint" in variant:
        checkpoint_blocks(model)
    if variant == CACHED:
        use_caching_allocator()
    with ExitStack() as stack:
        run = Run()
        if "tierstore" in variant:
            returns = "always" if variant == ALWAYS else "auto"
            store = stack.enter_context(TierStore(scratch, host_bytes=HOST_BYTES, return_memory=returns))
            run = Run(lambda: tiered_offload(store))

        def step(_: str) -> Figures:
            figures = timed_step(loss_of, optimizer, run)
            return figures | {"peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}

        serve(step)

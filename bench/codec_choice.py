"""Does codec "auto" find the best codec for each kind of data, with idle cores and beside a busy training?

A step moves a set of real saved tensors (`bench/trained_tensors.py`) down to disk and up again, twice over:

* **moving alone**: nothing else runs; the time of a step is the time of the moves.
* **beside compute**: every core multiplies matrices for about twice as long as the moves of unencoded bytes take;
  the time of a step is until both are done, so CPU seconds spent on encoding make it longer.

All codecs are measured in one process, by turns: an unmeasured step, then measured ones. Before its own "auto" takes
some more, in which it sees the machine as it is now and not as another codec left it. After one turn, fixed codecs that
are far behind drop out, so that those that matter are measured close together in time. Ratios are medians over turns of
"auto" to its neighbour in the same turn. "First use" is the first step of a new store, which knows nothing yet, beside
that of one without codec.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from tierstore import TierStore

from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .trained_tensors import KINDS, tensors_of_kind

CODECS = ("none", "auto", "zstd:-3", "zstd:1", "shuffle-zstd:1")
FIXED = tuple(codec for codec in CODECS if codec != "auto")
SCENES = ("moving alone", "beside compute")
QUALIFYING_TURNS = 1
TURNS = 5
STEPS = 2
SETTLE_SECONDS = 0.5
CLOSE = 1.5
COMPUTE_PER_MOVE = 2.0
MATRIX = 768
FIRST_USES = 3
IN_FLIGHT = 8

BENCHMARK = Benchmark(
    name="codec_choice",
    question='Codec "auto" beside the best fixed codec and beside none (ratios of times; 1: as fast)',
    variants=tuple(f"{kind}: {scene}" for kind in KINDS for scene in SCENES),
    rounds=1,
    timeout_seconds=600,  # the first of some kinds trains the model that they are from
    compare="none",
    goals=tuple(
        Goal(what, figure, f"{kind}: {scene}", at_most=1.05)
        for kind in KINDS
        for scene in SCENES
        for what, figure in (("auto, of the best fixed", "auto_to_best"), ("auto, of none", "auto_to_none"))
    ),
    settings={"turns": TURNS, "steps": STEPS, "settle_seconds": SETTLE_SECONDS, "compute_per_move": COMPUTE_PER_MOVE},
)

Step = Callable[[TierStore], None]


def move(store: TierStore, tensors: list[Tensor]) -> None:
    """Down and up again, in order; the last elements show that it was done."""
    handles = [store.put(tensor) for tensor in tensors]
    store.flush()
    for number, (handle, tensor) in enumerate(zip(handles, tensors, strict=True)):
        store.prefetch(handles[number : number + IN_FLIGHT])
        if store.get(handle)[-1] != tensor[-1]:
            raise AssertionError(f"tensor {number} came back changed")


def compute(num_products: int) -> None:
    """Keep every core busy."""
    left, right = torch.ones(MATRIX, MATRIX), torch.ones(MATRIX, MATRIX)
    for _ in range(num_products):
        torch.mm(left, right)


def step_beside_compute(tensors: list[Tensor], scratch: Path) -> Step:
    """A step that computes while it moves: as long as the machine's present speed asks for."""
    with TierStore(scratch, host_bytes=0, codec="none") as store:
        move_seconds = median_seconds(lambda: move(store, tensors), 4)
    product_seconds = median_seconds(lambda: compute(20), 5) / 20
    num_products = int(COMPUTE_PER_MOVE * move_seconds / product_seconds)

    def step(store: TierStore) -> None:
        mover = threading.Thread(target=move, args=(store, tensors))
        mover.start()
        compute(num_products)
        mover.join()

    return step


def median_seconds(work: Callable[[], object], times: int) -> float:
    """The median of some runs; the first one is not counted."""
    return statistics.median([seconds_of(work) for _ in range(times + 1)][1:])


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def by_turns(step: Step, scratch: Path, codecs: Sequence[str], turns: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of a step with each codec, turn by turn, and what share of the records "auto" encoded in measured steps.

    Each turn begins with another codec.
    """
    seconds: dict[str, list[float]] = {codec: [] for codec in codecs}
    stored: Counter[str] = Counter()
    with ExitStack() as stack:
        stores = {codec: stack.enter_context(TierStore(scratch, host_bytes=0, codec=codec)) for codec in codecs}
        for turn in range(turns):
            for number in range(len(codecs)):
                codec = codecs[(turn + number) % len(codecs)]
                settled = time.perf_counter() + (SETTLE_SECONDS if codec == "auto" else 0)
                step(stores[codec])
                while time.perf_counter() < settled:
                    step(stores[codec])
                before = choices_of(stores["auto"])
                measured = seconds_of(lambda codec=codec: [step(stores[codec]) for _ in range(STEPS)])
                seconds[codec].append(measured / STEPS)
                stored += choices_of(stores["auto"]) - before
    return seconds, 1 - stored["none"] / stored.total()


def choices_of(store: TierStore) -> Counter[str]:
    """How many records it has stored with each codec."""
    return sum((Counter(counts) for counts in store.stats().codec_choices.values()), Counter())


def first_use_ratio(step: Step, scratch: Path) -> float:
    """The first step of a store with codec "auto" beside that of one without."""
    seconds: dict[str, list[float]] = {"auto": [], "none": []}
    for _ in range(FIRST_USES):
        for codec, found in seconds.items():
            with TierStore(scratch, host_bytes=0, codec=codec) as store:
                found.append(seconds_of(lambda store=store: step(store)))
    return statistics.median(seconds["auto"]) / statistics.median(seconds["none"])


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Ratios of "auto" to the others, and the seconds of a step with each."""
    kind, scene = variant.split(": ")
    tensors = tensors_of_kind(kind, scratch.parent)
    step: Step = lambda store: move(store, tensors)  # noqa: E731
    if scene == "beside compute":
        step = step_beside_compute(tensors, scratch)
    seconds, _ = by_turns(step, scratch, CODECS, QUALIFYING_TURNS)
    medians = {codec: statistics.median(found) for codec, found in seconds.items()}
    fastest = min(medians[fixed] for fixed in FIXED)
    close = [codec for codec in CODECS if codec in ("none", "auto") or medians[codec] < CLOSE * fastest]
    measured, encoded_share = by_turns(step, scratch, close, TURNS)
    seconds |= measured
    ratios = {
        fixed: statistics.median(auto / other for auto, other in zip(seconds["auto"], seconds[fixed], strict=True))
        for fixed in close
        if fixed != "auto"
    }
    return {
        "auto_to_best": max(ratios.values()),
        "auto_to_none": ratios["none"],
        "first_use_to_none": first_use_ratio(step, scratch),
        "auto_encoded_share": encoded_share,
    } | {f"{codec}_seconds": statistics.median(found) for codec, found in seconds.items()}


if __name__ == "__main__":
    main_of_one_variant(measure)

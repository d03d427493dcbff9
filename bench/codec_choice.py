"""Does codec "auto" find the best codec for each kind of data, with idle cores and beside a busy training?

A step moves real saved tensors (`trained_tensors.py`) down to disk and up again; "beside compute", every core
multiplies matrices meanwhile, for about twice as long as the moves of unencoded bytes take, and a step lasts until both
are done.

All codecs have a store each in one process and take single steps in turns, in another order each time. "Auto" sees a
machine that it has for itself (`OwnClocks`), and settles before the first turn. Fixed codecs that are far behind drop
out. A ratio is the median over the turns of "auto" to its neighbour in the same turn, and the true one lies between
"low" and "high" with 95 %. Turns go on until all ratios are known within 3 %, as long as there is time.

"None" takes two steps a turn, and "auto" is compared with their mean. The ratio of one to the other, "same to same",
shows what chance does. "First use" is the first step of a new store, beside one without codec.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from tierstore import TierStore
from tierstore.disk.codec import policy as codec_policy
from tierstore.disk.codec.load import Readings, read_machine

from .goals import Goal
from .harness import Benchmark
from .paired import Estimate, estimate_of
from .parties import lap_of
from .trained_tensors import KINDS, tensors_of_kind

FIXED = ("none", "zstd:-3", "zstd:1", "shuffle-zstd:1")
AGAIN = "none, again"
SCENES = ("moving alone", "beside compute")
SETTLE_SECONDS = 0.5
LEAST_TURNS = 5
KNOWN_WITHIN = 0.03
MEASURED_SECONDS = 30.0
CLOSE = 1.5
COMPUTE_PER_MOVE = 2.0
MATRIX = 768
IN_FLIGHT = 8

BENCHMARK = Benchmark(
    name="codec_choice",
    question='Codec "auto" beside the best fixed codec and beside none (ratios of times; 1: as fast)',
    variants=tuple(f"{kind}: {scene}" for kind in KINDS for scene in SCENES),
    timeout_seconds=600,  # the first of some kinds trains the model that they are from
    goals=tuple(
        Goal(what, figure, f"{kind}: {scene}", at_most=1.05)
        for kind in KINDS
        for scene in SCENES
        for what, figure in (("auto, of the best fixed", "auto_to_best"), ("auto, of none", "auto_to_none"))
    ),
)

Step = Callable[[TierStore], None]
Seconds = dict[str, list[float]]
"""Of each step, by codec; one a turn."""


class OwnClocks:
    """The machine's clocks for one store that takes turns with others: they stand still while those have theirs. Else
    it would see a disk that is idle most of the time, and cores that are busy with other codecs."""

    def __init__(self) -> None:
        self._missed = Readings(0.0, 0.0, 0.0)

    def read(self) -> Readings:
        return _combined(read_machine(), self._missed, -1)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        before = read_machine()
        yield
        self._missed = _combined(self._missed, _combined(read_machine(), before, -1), 1)


def _combined(left: Readings, right: Readings, sign: int) -> Readings:
    idle = None if left.idle is None or right.idle is None else left.idle + sign * right.idle
    return Readings(left.wall + sign * right.wall, idle, left.process + sign * right.process)


class Turns:
    """Of stores with these codecs, by name; `open_store` opens one."""

    def __init__(self, codecs: Mapping[str, str], open_store: Callable[[str], TierStore], opened: ExitStack) -> None:
        self.clocks = OwnClocks()
        self._order = random.Random(0)
        opened.enter_context(patch.object(codec_policy, "read_machine", self.clocks.read))
        self.stores = {name: opened.enter_context(open_store(codec)) for name, codec in codecs.items()}

    def step(self, name: str, step: Step) -> float:
        with nullcontext() if name == "auto" else self.clocks.stopped():
            return lap_of(lambda: step(self.stores[name]))["seconds"]

    def take(self, names: Sequence[str], step: Step, seconds: Seconds) -> None:
        for name in self._order.sample(names, len(names)):
            seconds[name].append(self.step(name, step))

    def settle(self, step: Step) -> None:
        """Let "auto" see the machine as it is for its own steps."""
        settled = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < settled:
            self.step("auto", step)

    def stored(self) -> Counter[str]:
        return sum((Counter(counts) for counts in self.stores["auto"].stats().codec_choices.values()), Counter())


def move(store: TierStore, tensors: list[Tensor]) -> None:
    handles = [store.put(tensor) for tensor in tensors]
    store.flush()
    for number, (handle, tensor) in enumerate(zip(handles, tensors, strict=True)):
        store.prefetch(handles[number : number + IN_FLIGHT])
        if store.get(handle)[-1] != tensor[-1]:
            raise AssertionError(f"tensor {number} came back changed")


def compute(num_products: int) -> None:
    left, right = torch.ones(MATRIX, MATRIX), torch.ones(MATRIX, MATRIX)
    for _ in range(num_products):
        torch.mm(left, right)


def step_of(scene: str, tensors: list[Tensor], turns: Turns) -> Step:
    """Moves alone, or beside as much computing as the machine's present speed asks for."""
    if scene == "moving alone":
        return lambda store: move(store, tensors)
    move_seconds = median_seconds(lambda: turns.step("none", lambda store: move(store, tensors)), 4)
    product_seconds = median_seconds(lambda: compute(20), 5) / 20
    num_products = int(COMPUTE_PER_MOVE * move_seconds / product_seconds)

    return lambda store: move_beside_compute(store, tensors, num_products)


def move_beside_compute(store: TierStore, tensors: list[Tensor], num_products: int) -> None:
    mover = threading.Thread(target=move, args=(store, tensors))
    mover.start()
    compute(num_products)
    mover.join()


def median_seconds(work: Callable[[], object], times: int) -> float:
    return statistics.median([lap_of(work)["seconds"] for _ in range(times + 1)][1:])


def close_ones(seconds: Seconds) -> list[str]:
    """Who goes on: not the fixed codecs whose quickest step so far is far behind; a single one may be disturbed."""
    quickest = {name: min(found) for name, found in seconds.items()}
    fastest = min(quickest[fixed] for fixed in FIXED if fixed in quickest)
    return [name for name in seconds if name in ("auto", "none", AGAIN) or quickest[name] < CLOSE * fastest]


def compared(seconds: Seconds) -> dict[str, Estimate]:
    """How "auto" stands to each codec that took every turn, and "none" to itself ("same")."""
    unencoded = [(one + other) / 2 for one, other in zip(seconds["none"], seconds[AGAIN], strict=True)]
    pairs = {name: (seconds["auto"], seconds[name]) for name in FIXED if len(seconds[name]) == len(unencoded)}
    pairs |= {"none": (seconds["auto"], unencoded), "same": (seconds["none"], seconds[AGAIN])}
    return {name: estimate_of(ones, others) for name, (ones, others) in pairs.items()}


def take_turns(turns: Turns, step: Step, first: Mapping[str, float]) -> Seconds:
    """Until every ratio is known well enough, or the time is over. `first`: of each, a step that is not measured."""
    seconds: Seconds = {name: [] for name in turns.stores}
    close = list(seconds)
    ends = time.perf_counter() + MEASURED_SECONDS
    error = math.inf
    while len(seconds["auto"]) < LEAST_TURNS or (time.perf_counter() < ends and error > KNOWN_WITHIN):
        turns.take(close, step, seconds)
        error = max(ratio.error for ratio in compared(seconds).values())
        close = close_ones({name: [first[name], *seconds[name]] for name in close})
    return seconds


def measure(variant: str, scratch: Path) -> dict[str, float]:
    kind, scene = variant.split(": ")
    tensors = tensors_of_kind(kind, scratch.parent)
    with ExitStack() as opened:
        codecs = {"auto": "auto", AGAIN: "none"} | {name: name for name in FIXED}
        turns = Turns(codecs, lambda codec: TierStore(scratch, host_bytes=0, codec=codec), opened)
        step = step_of(scene, tensors, turns)
        first = {name: turns.step(name, step) for name in turns.stores}
        turns.settle(step)
        before = turns.stored()
        seconds = take_turns(turns, step, first)
        stored = turns.stored() - before
    ratios = compared(seconds)
    best = max((ratio for name, ratio in ratios.items() if name in FIXED), key=lambda ratio: ratio.median)
    return {
        "auto_to_best": best.median,
        "auto_to_none": ratios["none"].median,
        "same_to_same": ratios["same"].median,
        "auto_encoded_share": 1 - stored["none"] / stored.total(),
        "auto_to_best_low": best.low,
        "auto_to_best_high": best.high,
        "auto_to_none_low": ratios["none"].low,
        "auto_to_none_high": ratios["none"].high,
        "first_use_to_none": first["auto"] / first[AGAIN],
        "turns": len(seconds["auto"]),
    } | {f"{name}_seconds": statistics.median(found) for name, found in seconds.items()}

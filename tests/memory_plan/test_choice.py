"""What is decided by prices, and which decisions are tried."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from tierstore.memory_plan.choice import Chooser, rivals_of
from tierstore.memory_plan.decision import (
    NARROW_BYTES,
    Action,
    BlockPlan,
    Decision,
    Moment,
    Option,
    Prices,
    StepCosts,
)
from tierstore.memory_plan.prices import TriedDecision
from tierstore.memory_plan.steps import MeasuredStep

MIB = 2**20
LIMIT_BYTES = 100 * MIB
KEEP, STORE, RECOMPUTE = Action("keep"), Action("store"), Action("recompute")
SAVED = {1: 64 * MIB}
KEPT, STORED = Option(KEEP, SAVED, {}, 0.0), Option(STORE, {}, SAVED, 0.0)


def of_a_block(*options: Option, peak_mib: int = 50, costs: StepCosts | None = None) -> Prices:
    """Of one block of 64 MiB. A plain step takes a second; to store the block adds 0.1 s."""
    moments = [Moment(peak_mib * MIB, frozenset({"block"}), "block", peak_mib * MIB)]
    return Prices({"block": options}, moments, costs or StepCosts(1.0, 0.1 / (64 * MIB), 0))


ONE_BLOCK = of_a_block(KEPT, STORED, Option(RECOMPUTE, {}, {}, 0.2))


@pytest.mark.parametrize(
    ("store_mib", "peak_mib"),
    [(34, 94), (40, 84), (60, None)],
    ids=["has room", "has room for a narrow window", "has no room"],
)
def test_window_is_narrowed_only_if_nothing_else_fits(store_mib: int, peak_mib: int | None) -> None:
    """A margin is 16 MiB, and a narrow window spares 16 MiB."""
    prices = of_a_block(KEPT, STORED, peak_mib=60, costs=StepCosts(1.0, 0.0, store_mib * MIB))
    chooser = Chooser(prices._replace(spared_bytes=16 * MIB), 110 * MIB)
    decision = chooser.decide()
    assert (None if decision is None else decision.peak_bytes // MIB) == peak_mib
    if decision is not None:
        is_narrow = peak_mib != 60 + store_mib
        assert decision.staging_bytes == (NARROW_BYTES if is_narrow else None)
        assert (chooser.decide(0.9) is None) or not is_narrow, "a part of the limit is only tried if there is room"


@pytest.mark.parametrize(("differs", "otherwise"), [("", KEEP), ("a second call gave other bits", STORE)])
def test_strategy_of_computing_all_again_leaves_what_spares_nothing(differs: str, otherwise: Action) -> None:
    """As checkpoints of each layer leave the head. A block that must not be computed again is stored."""
    prices = of_a_block(KEPT, STORED)._replace(blocks={"block": BlockPlan("block", "Linear", differs=differs)})
    assert prices.uniform(RECOMPUTE).actions == {"block": otherwise}


def of_many_blocks() -> Prices:
    """64 blocks of 32 MiB. A step without them takes 16 MiB and a second; each adds 0.1 s if it is computed again."""
    names = [f"block {number}" for number in range(64)]
    options = {
        name: [Option(KEEP, {key: 32 * MIB}, {}, 0.0), Option(RECOMPUTE, {}, {}, 0.1)] for key, name in enumerate(names)
    }
    return Prices(options, [Moment(16 * MIB, frozenset(names), names[-1], 16 * MIB)], StepCosts(1.0, 0.0, 0))


class TrialsNearTheLimit:
    """Beside what is alive, some more is resident. Where that takes more than a part of the limit, memory is returned,
    and a step takes twice as long."""

    def __init__(self, beside_mib: int = 0, most_mib: int = 2**20) -> None:
        self._beside_bytes, self._most_bytes = beside_mib * MIB, most_mib * MIB
        self.tried: list[Decision] = []
        self.num_steps = 0

    def take(self, decision: Decision, num_steps: int) -> MeasuredStep:
        self.tried.append(decision)
        self.num_steps += num_steps
        peak_bytes = decision.peak_bytes + self._beside_bytes
        is_short = peak_bytes > self._most_bytes
        return MeasuredStep((1 + is_short) * decision.step_seconds, peak_bytes, is_short * MIB)


MANY_BYTES = 1600 * MIB


@pytest.mark.parametrize(
    ("beside_mib", "most_mib", "shares", "best"),
    [
        (0, 2**20, (0.94, 1.0), 1),
        (0, 1300, (0.94, 0.8), 1),
        (0, 16, (0.94, 0.8), 0),
        (240, 2**20, (0.94, 0.94), 1),
    ],
    ids=["has room", "is short at first", "is short in any case", "does not fit at first"],
)
def test_what_the_first_trial_shows_decides_on_the_second(
    beside_mib: int, most_mib: int, shares: tuple[float, float], best: int
) -> None:
    """A margin of a sixteenth is left free in each. `best`: which of the two is followed."""
    trials = TrialsNearTheLimit(beside_mib, most_mib)
    found = Chooser(of_many_blocks(), MANY_BYTES, 12).choose(trials, [])  # type: ignore[arg-type]
    assert found is not None
    assert found.measured.peak_bytes <= MANY_BYTES
    assert found.decision is trials.tried[best]
    for number, (tried, share) in enumerate(zip(trials.tried[:2], shares, strict=True)):
        most_bytes = (share - 1 / 16) * MANY_BYTES - number * beside_mib * MIB
        assert most_bytes - 32 * MIB < tried.peak_bytes <= most_bytes
    assert trials.num_steps <= 12


def test_the_whole_limit_is_used_if_less_does_not_do() -> None:
    """Of 100 MiB, 50 are needed in any case, and the margin is 16."""
    chooser = Chooser(of_a_block(KEPT, Option(RECOMPUTE, {1: 32 * MIB}, {}, 0.2)), LIMIT_BYTES)
    assert chooser.decide(0.94) is None
    assert chooser.choose(TrialsNearTheLimit(), []) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit_mib", "is_kept"), [(130, True), (129, False)], ids=["with a margin", "without"])
def test_all_is_kept_only_if_that_leaves_a_margin(limit_mib: int, is_kept: bool) -> None:
    """Kept, the block makes the peak 114 MiB, and the margin is 16. A trial beyond the limit may be killed."""
    trials = TrialsNearTheLimit()
    best = Chooser(ONE_BLOCK, limit_mib * MIB).choose(trials, [])  # type: ignore[arg-type]
    assert best is not None
    assert best.decision.actions == {"block": KEEP if is_kept else STORE}
    assert [decision.actions == {"block": KEEP} for decision in trials.tried] == ([True] if is_kept else [False, False])


@pytest.mark.parametrize(("known_mib", "is_followed"), [(100, True), (101, False)])
def test_where_no_trial_fits_a_strategy_that_did_is_followed(known_mib: int, is_followed: bool) -> None:
    known = TriedDecision(ONE_BLOCK.uniform(RECOMPUTE), MeasuredStep(1.3, known_mib * MIB))
    chooser, trials = Chooser(ONE_BLOCK, LIMIT_BYTES), TrialsNearTheLimit(beside_mib=60)
    assert chooser.choose(trials, [known]) == (known if is_followed else None)  # type: ignore[arg-type]
    assert chooser.offset_bytes == 60 * MIB


@pytest.mark.parametrize(("seconds", "is_followed"), [(0.9, True), (9.0, False)])
def test_strategy_that_was_measured_to_be_faster_than_what_the_prices_decide_is_followed(
    seconds: float, is_followed: bool
) -> None:
    known = TriedDecision(ONE_BLOCK.uniform(RECOMPUTE), MeasuredStep(seconds, MIB))
    best = Chooser(ONE_BLOCK, LIMIT_BYTES).choose(TrialsNearTheLimit(), [known])  # type: ignore[arg-type]
    assert best is not None
    assert (best == known) == is_followed


# --- by turns ---------------------------------------------------------------------------------------------------------


def tried(action: Action, seconds: float, mib: int = 10) -> TriedDecision:
    return TriedDecision(ONE_BLOCK.uniform(action), MeasuredStep(seconds, mib * MIB))


MIXED = TriedDecision(ONE_BLOCK.decision_of({"block": Option(Action("recompute", stores=True), {}, {}, 0.3)}),
                      MeasuredStep(1.0, MIB))  # fmt: skip
SIMPLE = [{"block": action} for action in (KEEP, STORE, RECOMPUTE)]
TURNS: dict[str, tuple[list[TriedDecision], int, list[object], int]] = {
    "nothing fits": ([], 6, [], 0),
    "one alone": ([MIXED], 6, [MIXED], 0),
    "two": ([tried(STORE, 1.2), MIXED], 9, [MIXED, tried(STORE, 1.2)], 2),
    "much slower": ([tried(STORE, 1.6), MIXED], 8, [MIXED], 0),
    "simple ones before others": (
        [MIXED, tried(STORE, 0.9), tried(RECOMPUTE, 1.1)],
        4,
        [tried(STORE, 0.9), tried(RECOMPUTE, 1.1)],
        1,
    ),
    "others if there are steps": (
        [MIXED, tried(STORE, 0.9), tried(RECOMPUTE, 1.1)],
        6,
        [tried(STORE, 0.9), tried(RECOMPUTE, 1.1), MIXED],
        1,
    ),
    "the same twice": ([tried(STORE, 1.1), MIXED, tried(STORE, 1.2)], 4, [MIXED, tried(STORE, 1.1)], 1),
    "no steps left": ([tried(STORE, 1.1), MIXED], 1, [], 0),
}


@pytest.mark.parametrize("case", TURNS.values(), ids=TURNS.keys())
def test_what_takes_turns(case: tuple[list[TriedDecision], int, list[object], int]) -> None:
    fitting, num_steps, rivals, num_turns = case
    assert rivals_of(fitting, SIMPLE, num_steps) == (rivals, num_turns)


class TrialsOfABusyMachine:
    """What is decided takes the time, and the memory, that `true` has for the kinds of its actions. Trials of anything
    for the first time are disturbed."""

    def __init__(self, rng: random.Random, true: Mapping[str, MeasuredStep]) -> None:
        self._rng, self._true = rng, true
        self._known: set[str] = set()
        self.num_steps = 0

    @staticmethod
    def kind_of(decision: Decision) -> str:
        return "".join(sorted({action.kind[0] for action in decision.actions.values()}))

    def take(self, decision: Decision, num_steps: int) -> MeasuredStep:
        self.num_steps += num_steps
        kind = self.kind_of(decision)
        true = self._true[kind]
        disturbed = true.seconds * (1.0 if kind in self._known else self._rng.uniform(1.0, 1.45))
        self._known.add(kind)
        return true._replace(seconds=disturbed)


@pytest.mark.parametrize("seed", range(60))
def test_never_slower_than_a_simple_strategy_that_fits(seed: int) -> None:
    """Whatever trials show at first, and whatever the prices say. What exceeds the limit in a step is not followed."""
    rng = random.Random(seed)
    names = [f"block {number}" for number in range(8)]
    options = {
        name: [
            Option(KEEP, {key: 32 * MIB}, {}, 0.0),
            Option(STORE, {}, {key: 32 * MIB}, 0.0),
            Option(RECOMPUTE, {}, {}, rng.uniform(0.01, 0.2)),
        ]
        for key, name in enumerate(names)
    }
    moments = [Moment(MIB, frozenset(names), names[-1], MIB)]
    prices = Prices(options, moments, StepCosts(1.0, rng.uniform(0.01, 0.2) / (32 * MIB), MIB))
    limit_bytes = rng.randint(40, 300) * MIB
    kinds = "k", "s", "r", "ks", "kr", "rs", "krs"
    true = {
        kind: MeasuredStep(rng.uniform(1.0, 1.5), int(limit_bytes * rng.choice([0.9, 0.9, 1.0, 1.01])), MIB)
        for kind in kinds
    }
    trials = TrialsOfABusyMachine(rng, true)
    known = [TriedDecision(each, trials.take(each, 2)) for each in (prices.uniform(STORE),)]
    trials.num_steps = 0
    found = Chooser(prices, limit_bytes, 12).choose(trials, known)  # type: ignore[arg-type]
    assert trials.num_steps <= 12
    simple = [true[kind].seconds for kind in "sr" if true[kind].peak_bytes <= limit_bytes]
    if found is None:
        assert not simple
    else:
        chosen = true[trials.kind_of(found.decision)]
        assert chosen.peak_bytes <= limit_bytes
        assert chosen.seconds <= 1.02 * min(simple, default=chosen.seconds)


class TrialsThatGrow(TrialsNearTheLimit):
    """Each time that something is tried, its peak is higher."""

    def take(self, decision: Decision, num_steps: int) -> MeasuredStep:
        measured = super().take(decision, num_steps)
        more_bytes = sum(each.actions == decision.actions for each in self.tried) * 20 * MIB
        return measured._replace(peak_bytes=measured.peak_bytes + more_bytes)


def test_what_exceeds_the_limit_in_its_turn_is_not_followed() -> None:
    """To store the block is faster, but its peak is 70 MiB at first, and then 90."""
    chooser, trials = Chooser(ONE_BLOCK, 80 * MIB, 6), TrialsThatGrow()
    best = chooser.choose(trials, [tried(RECOMPUTE, 1.2)])  # type: ignore[arg-type]
    assert [decision.actions["block"] for decision in trials.tried] == [STORE, STORE, RECOMPUTE]
    assert best is not None
    assert best.decision.actions == {"block": RECOMPUTE}
    assert best.measured.peak_bytes == 70 * MIB

"""What is decided by prices, and which decisions are tried."""

from __future__ import annotations

import pytest

from tierstore.memory_plan.choice import Corrected, TriedDecision, choose
from tierstore.memory_plan.decision import NARROW_BYTES, Decision, Moment, StepCosts
from tierstore.memory_plan.menu import Action, Option
from tierstore.memory_plan.prices import Prices
from tierstore.memory_plan.steps import MeasuredStep

MIB = 2**20
LIMIT_BYTES = 100 * MIB
STORE, RECOMPUTE = Action("store"), Action("recompute")


@pytest.fixture
def corrected() -> Corrected:
    """One block of 64 MiB. A plain step takes a second; to store the block adds 0.1 s, to compute it again 0.2."""
    saved = {1: 64 * MIB}
    options = [Option(Action("keep"), saved, {}, 0.0), Option(STORE, {}, saved, 0.0), Option(RECOMPUTE, {}, {}, 0.2)]
    moments = [Moment(50 * MIB, frozenset({"block"}), "block", 50 * MIB)]
    costs = StepCosts(1.0, 0.1 / (64 * MIB), 0)
    return Corrected(Prices({"block": options}, moments, costs, {}, {}, {}, 0, 1, False), LIMIT_BYTES)


def decided(corrected: Corrected) -> Decision:
    decision = corrected.decide()
    assert decision is not None
    return decision


@pytest.mark.parametrize(
    ("peak_mib", "store_mib", "is_narrow"),
    [(60, 34, False), (60, 40, True), (60, 60, None)],
    ids=["has room", "has room for a narrow window", "has no room"],
)
def test_window_is_narrowed_only_if_nothing_else_fits(peak_mib: int, store_mib: int, is_narrow: bool | None) -> None:
    """A margin is 16 MiB, and a narrow window spares 16 MiB."""
    saved = {1: 64 * MIB}
    options = {"block": [Option(Action("keep"), saved, {}, 0.0), Option(STORE, {}, saved, 0.0)]}
    moments = [Moment(peak_mib * MIB, frozenset({"block"}), "block", peak_mib * MIB)]
    costs = StepCosts(1.0, 0.0, store_mib * MIB, 16 * MIB)
    corrected = Corrected(Prices(options, moments, costs, {}, {}, {}, 0, 1, False), 110 * MIB)
    decision, fitting = corrected.decide(), corrected.fitting({"block": STORE})
    assert decision == fitting
    assert (None if decision is None else decision.is_narrow) == is_narrow
    if is_narrow:
        assert decision is not None
        assert decision.peak_bytes == (peak_mib + store_mib - 16) * MIB
        assert decision.staging_bytes == NARROW_BYTES
        assert corrected.decide(0.9) is None, "a part of the limit is only tried if there is room"


def many_blocks() -> Prices:
    """64 blocks of 32 MiB. A step without them takes 16 MiB and a second; each adds 0.1 s if it is computed again."""
    names = [f"block {number}" for number in range(64)]
    options = {
        name: [Option(Action("keep"), {key: 32 * MIB}, {}, 0.0), Option(RECOMPUTE, {}, {}, 0.1)]
        for key, name in enumerate(names)
    }
    moments = [Moment(16 * MIB, frozenset(names), names[-1], 16 * MIB)]
    return Prices(options, moments, StepCosts(1.0, 0.0, 0), {}, {}, {}, 0, 1, False)


class TrialsNearTheLimit:
    """Beside what is alive, some more is resident. Where that takes more than a part of the limit, memory is returned,
    and a step takes twice as long."""

    def __init__(self, beside_bytes: int = 0, most_bytes: int = 2**40) -> None:
        self._beside_bytes, self._most_bytes = beside_bytes, most_bytes
        self.tried: list[Decision] = []
        self.num_steps = 0

    def take(self, decision: Decision, _: Prices, num_steps: int) -> MeasuredStep:
        self.tried.append(decision)
        self.num_steps += num_steps
        peak_bytes = decision.peak_bytes + self._beside_bytes
        is_short = peak_bytes > self._most_bytes
        return MeasuredStep((1 + is_short) * decision.step_seconds, peak_bytes, is_short * MIB)


MANY_BYTES = 1600 * MIB


@pytest.mark.parametrize(
    ("beside_mib", "most_mib", "shares", "best_share"),
    [
        (0, 2**20, (0.94, 1.0), 1.0),
        (0, 1300, (0.94, 0.8), 0.8),
        (0, 16, (0.94, 0.8), 0.94),
        (240, 2**20, (0.94, 0.94), 0.94),
    ],
    ids=["has room", "is short at first", "is short in any case", "does not fit at first"],
)
def test_what_the_first_trial_shows_decides_on_the_second(
    beside_mib: int, most_mib: int, shares: tuple[float, float], best_share: float
) -> None:
    """A margin of a sixteenth is left free in each."""
    trials, corrected = TrialsNearTheLimit(beside_mib * MIB, most_mib * MIB), Corrected(many_blocks(), MANY_BYTES)
    best = choose(trials, corrected, MANY_BYTES, [])  # type: ignore[arg-type]
    assert best is not None
    assert best.measured.peak_bytes <= MANY_BYTES
    assert best.share == best_share
    for tried, share in zip(trials.tried, shares, strict=True):
        most_bytes = (share - 1 / 16) * MANY_BYTES
        assert tried.peak_bytes <= most_bytes
    assert trials.num_steps <= 5
    assert decided(corrected).peak_bytes == best.decision.peak_bytes, "it is decided again for the same share"


def test_the_whole_limit_is_used_if_less_does_not_do(corrected: Corrected) -> None:
    """Of 100 MiB, 50 are needed in any case, and the margin is 16."""
    saved = {1: 64 * MIB}
    options = {"block": [Option(Action("keep"), saved, {}, 0.0), Option(RECOMPUTE, {1: 32 * MIB}, {}, 0.2)]}
    tight = Corrected(corrected.prices._replace(options=options), LIMIT_BYTES)
    assert tight.decide(0.94) is None
    best = choose(TrialsNearTheLimit(), tight, LIMIT_BYTES, [])  # type: ignore[arg-type]
    assert best is not None
    assert best.share == 1


@pytest.mark.parametrize(("limit_mib", "is_kept"), [(130, True), (129, False)], ids=["with a margin", "without"])
def test_all_is_kept_only_if_that_leaves_a_margin(corrected: Corrected, limit_mib: int, is_kept: bool) -> None:
    """Kept, the block makes the peak 114 MiB, and the margin is 16. A trial beyond the limit may be killed."""
    trials = TrialsNearTheLimit()
    best = choose(trials, Corrected(corrected.prices, limit_mib * MIB), limit_mib * MIB, [])  # type: ignore[arg-type]
    assert best is not None
    assert best.decision.actions == {"block": Action("keep") if is_kept else STORE}
    assert [decision.actions == {"block": Action("keep")} for decision in trials.tried] == [is_kept]


@pytest.mark.parametrize(("known_mib", "is_followed"), [(100, True), (101, False)])
def test_where_no_trial_fits_a_strategy_that_did_is_followed(
    corrected: Corrected, known_mib: int, is_followed: bool
) -> None:
    known = TriedDecision(corrected.prices.uniform(RECOMPUTE), MeasuredStep(1.3, known_mib * MIB))
    trials = TrialsNearTheLimit(beside_bytes=60 * MIB)
    assert choose(trials, corrected, LIMIT_BYTES, [known]) == (known if is_followed else None)  # type: ignore[arg-type]
    assert corrected.offset_bytes == 60 * MIB

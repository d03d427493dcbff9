"""What prices learn from steps of a training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierstore.memory_plan.choice import Corrected, TriedDecision, choose
from tierstore.memory_plan.decision import NARROW_BYTES, Decision, Moment, StepCosts
from tierstore.memory_plan.menu import Action, Kind, Option
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


def learn(corrected: Corrected, seconds: float, waited_seconds: float, peak_bytes: int = 50 * MIB) -> None:
    """Steps that were expected to take 1.1 s took so many."""
    decision = decided(corrected)
    assert decision.actions == {"block": STORE}
    corrected.learn_step(decision, MeasuredStep(seconds, peak_bytes), 1.1, waited_seconds)


def test_training_that_waited_for_the_store_stores_less(corrected: Corrected) -> None:
    learn(corrected, 1.6, waited_seconds=0.4)
    assert decided(corrected).actions == {"block": RECOMPUTE}


@pytest.mark.parametrize("seconds", [1.6, 0.7])
def test_machine_that_is_slower_or_faster_changes_no_decision(corrected: Corrected, seconds: float) -> None:
    learn(corrected, seconds, waited_seconds=0.1)
    assert decided(corrected).actions == {"block": STORE}
    assert decided(corrected).step_seconds == pytest.approx(seconds)


@pytest.mark.parametrize("waited_seconds", [0.0, 0.4])
def test_peak_beyond_the_limit_is_learned_whatever_was_slow(corrected: Corrected, waited_seconds: float) -> None:
    learn(corrected, 1.6, waited_seconds, LIMIT_BYTES + MIB)
    assert corrected.offset_bytes == 51 * MIB


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


class ByTurns:
    """Steps by turns take as long as trials do."""

    def take_by_turns(self, decisions: list[Decision], prices: Prices) -> list[list[MeasuredStep]]:
        return [[self.take(decision, prices)] * 3 for decision in decisions]

    def take(self, decision: Decision, prices: Prices) -> MeasuredStep:
        raise NotImplementedError


class TrialsThatSlowDown(ByTurns):
    """Steps of a second and the blocks' options; where what is alive takes more than a part of the limit, memory is
    returned, and they take twice that."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def take(self, decision: Decision, _: Prices) -> MeasuredStep:
        seconds = 1 + 0.1 * sum(action == RECOMPUTE for action in decision.actions.values())
        is_short = decision.peak_bytes > self._most_bytes
        return MeasuredStep((1 + is_short) * seconds, decision.peak_bytes, is_short * MIB)


@pytest.mark.parametrize("share", [1.0, 0.94, 0.85, 0.7])
def test_decision_that_leaves_room_is_kept_to_where_steps_near_the_limit_are_slower(share: float) -> None:
    limit_bytes = 1600 * MIB
    corrected, most_bytes = Corrected(many_blocks(), limit_bytes), int((share - 0.05) * limit_bytes)
    best = choose(TrialsThatSlowDown(most_bytes), corrected, limit_bytes, [])  # type: ignore[arg-type]
    assert best is not None
    assert best.share == share
    assert most_bytes - 64 * MIB < best.decision.peak_bytes <= most_bytes
    assert decided(corrected).peak_bytes == best.decision.peak_bytes, "it is decided again for the same share"


class TrialsNearTheLimit(ByTurns):
    """Memory is returned in all of them; beside what is alive, a part of the limit is resident."""

    def __init__(self, beside_bytes: int) -> None:
        self._beside_bytes = beside_bytes
        self.most_alive_bytes = 0

    def take(self, decision: Decision, _: Prices) -> MeasuredStep:
        self.most_alive_bytes = max(self.most_alive_bytes, decision.peak_bytes)
        return MeasuredStep(decision.step_seconds, decision.peak_bytes + self._beside_bytes, MIB)


@pytest.mark.parametrize("beside_mib", [96, 240], ids=["fits", "does not fit at first"])
def test_where_memory_is_short_no_trial_is_for_the_whole_limit(beside_mib: int) -> None:
    """0.94 of 1600 MiB, less a margin of a sixteenth, are 1404."""
    limit_bytes, trials = 1600 * MIB, TrialsNearTheLimit(beside_mib * MIB)
    best = choose(trials, Corrected(many_blocks(), limit_bytes), limit_bytes, [])  # type: ignore[arg-type]
    assert trials.most_alive_bytes <= 1404 * MIB
    assert best is not None
    assert best.measured.peak_bytes <= limit_bytes


def test_the_whole_limit_is_used_if_less_does_not_do(corrected: Corrected) -> None:
    """Of 100 MiB, 50 are needed in any case, and the margin is 16."""
    saved = {1: 64 * MIB}
    options = {"block": [Option(Action("keep"), saved, {}, 0.0), Option(RECOMPUTE, {1: 32 * MIB}, {}, 0.2)]}
    tight = Corrected(corrected.prices._replace(options=options), LIMIT_BYTES)
    assert tight.decide(0.94) is None
    best = choose(TrialsNearTheLimit(0), tight, LIMIT_BYTES, [])  # type: ignore[arg-type]
    assert best is not None
    assert best.share == 1


class NotingPrices(Corrected):
    """Notes by which prices was decided."""

    def __init__(self, prices: Prices, limit_bytes: int) -> None:
        super().__init__(prices, limit_bytes)
        self.decided_by: list[Prices] = []

    def decide(self, share: float | None = None, *, without: Kind | None = None) -> Decision | None:
        if without is None:
            self.decided_by.append(self.prices)
        return super().decide(share, without=without)


def test_what_returning_memory_took_is_no_price_in_the_end() -> None:
    """Memory is returned in every trial. Only the second decision for the whole limit takes that for prices."""
    corrected = NotingPrices(many_blocks(), 1600 * MIB)
    best = choose(TrialsThatSlowDown(0), corrected, 1600 * MIB, [])  # type: ignore[arg-type]
    assert best is not None
    assert corrected.prices == many_blocks()
    assert [prices == many_blocks() for prices in corrected.decided_by] == [True, False, True, True]


class Measured(ByTurns):
    """Trials that take these seconds, by what is done with the block, and note what was tried."""

    def __init__(self, seconds: dict[str, float], returned_bytes: int = 0) -> None:
        self._seconds, self._returned_bytes = seconds, returned_bytes
        self.tried: list[str] = []

    def take(self, decision: Decision, _: Prices) -> MeasuredStep:
        self.tried.append(decision.actions["block"].kind)
        return MeasuredStep(self._seconds[self.tried[-1]], decision.peak_bytes, self._returned_bytes)


@pytest.mark.parametrize(("returned_bytes", "seconds"), [(0, 1.35), (MIB, 1.1)])
def test_prices_learn_from_trials_in_which_nothing_was_returned(
    corrected: Corrected, returned_bytes: int, seconds: float
) -> None:
    """A step that was to take 1.1 s took 1.6. The next decision, as if that were the store's price, takes longer."""
    trials = Measured({"store": 1.6, "recompute": 1.8}, returned_bytes)
    best = choose(trials, corrected, LIMIT_BYTES, [])  # type: ignore[arg-type]
    assert trials.tried == ["store", "recompute"]
    assert best is not None
    assert best.decision.actions == {"block": STORE}
    now = corrected.prices.decision_for(best.decision.actions)
    assert now is not None
    assert now.step_seconds == pytest.approx(seconds)


def test_choice_known_before_the_trials_is_measured_again(corrected: Corrected) -> None:
    """To compute it again took 1.0 s then, and takes 1.4 now."""
    known = TriedDecision(corrected.prices.uniform(RECOMPUTE), MeasuredStep(1.0, 50 * MIB))
    trials = Measured({"store": 1.1, "recompute": 1.4})
    best = choose(trials, corrected, LIMIT_BYTES, [known])  # type: ignore[arg-type]
    assert best is not None
    assert trials.tried == ["store", "store", "recompute"]
    assert best.decision.actions == {"block": STORE}


def test_each_choice_known_before_the_trials_is_measured_again(corrected: Corrected) -> None:
    """All seemed to be faster than what is tried."""
    ways = [RECOMPUTE, STORE]
    known = [TriedDecision(corrected.prices.uniform(way), MeasuredStep(0.5, 50 * MIB)) for way in ways]
    trials = Measured({"store": 1.1, "recompute": 1.4})
    best = choose(trials, corrected, LIMIT_BYTES, known)  # type: ignore[arg-type]
    assert best is not None
    assert sorted(trials.tried) == ["recompute", "store"]
    assert best.measured.seconds == 1.1


@pytest.mark.parametrize(("limit_mib", "is_kept"), [(130, True), (129, False)], ids=["with a margin", "without"])
def test_all_is_kept_only_if_that_leaves_a_margin(corrected: Corrected, limit_mib: int, is_kept: bool) -> None:
    """Kept, the block makes the peak 114 MiB, and the margin is 16. A trial beyond the limit may be killed."""
    trials = Measured({"keep": 1.0, "store": 1.1, "recompute": 1.2})
    best = choose(trials, Corrected(corrected.prices, limit_mib * MIB), limit_mib * MIB, [])  # type: ignore[arg-type]
    assert best is not None
    assert ("keep" in trials.tried) == is_kept


@pytest.fixture
def two_blocks() -> Corrected:
    """Blocks of 64 MiB. To store one adds 0.1 s; to compute it again, 0.05 s for the first and 0.17 for the second."""
    options = {
        name: [
            Option(Action("keep"), {key: 64 * MIB}, {}, 0.0),
            Option(STORE, {}, {key: 64 * MIB}, 0.0),
            Option(RECOMPUTE, {}, {}, seconds),
        ]
        for key, (name, seconds) in enumerate({"first": 0.05, "second": 0.17}.items())
    }
    moments = [Moment(50 * MIB, frozenset(options), "second", 50 * MIB)]
    costs = StepCosts(1.0, 0.1 / (64 * MIB), 0)
    return Corrected(Prices(options, moments, costs, {}, {}, {}, 0, 1, False), LIMIT_BYTES)


class TwoBlocks(ByTurns):
    """Trials that take these seconds, by what is done with both blocks, and note what was tried."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self.tried: list[str] = []

    def take(self, decision: Decision, _: Prices) -> MeasuredStep:
        self.tried.append(" and ".join(action.kind for action in decision.actions.values()))
        return MeasuredStep(self._seconds[self.tried[-1]], decision.peak_bytes)


@pytest.mark.parametrize(
    ("fastest", "seconds"),
    [("store and store", (1.6, 1.2, 1.5)), ("recompute and recompute", (1.6, 1.5, 1.2))],
    ids=["to recompute takes longer", "to store takes longer"],
)
def test_where_a_mixture_is_slower_than_predicted_one_way_alone_is_followed(
    two_blocks: Corrected, fastest: str, seconds: tuple[float, float, float]
) -> None:
    kinds = "recompute and store", "store and store", "recompute and recompute"
    trials = TwoBlocks(dict(zip(kinds, seconds, strict=True)))
    best = choose(trials, two_blocks, LIMIT_BYTES, [])  # type: ignore[arg-type]
    assert best is not None
    assert best.decision.actions == dict(zip(("first", "second"), map(Action, fastest.split(" and ")), strict=True))  # type: ignore[arg-type]


def test_one_way_alone_is_not_tried_if_it_is_predicted_to_be_much_slower(two_blocks: Corrected) -> None:
    """Predicted are 1.15 s for the mixture, 1.2 if both are stored, and 1.5 if both are computed again."""
    prices = two_blocks.prices
    slow = [
        option if option.action != RECOMPUTE else replace(option, seconds=0.45) for option in prices.options["second"]
    ]
    corrected = Corrected(prices._replace(options={**prices.options, "second": slow}), LIMIT_BYTES)
    trials = TwoBlocks({"recompute and store": 1.15, "store and store": 1.2})
    best = choose(trials, corrected, LIMIT_BYTES, [])  # type: ignore[arg-type]
    assert best is not None
    assert best.measured.seconds == 1.15
    assert set(trials.tried) == {"recompute and store", "store and store"}


@pytest.mark.parametrize("without", ["store", "recompute"])
def test_nothing_is_decided_without_what_a_block_needs(without: Kind) -> None:
    saved = {1: 64 * MIB}
    only = [Option(STORE, {}, saved, 0.0)] if without == "store" else [Option(RECOMPUTE, {}, {}, 0.2)]
    moments = [Moment(50 * MIB, frozenset({"block"}), "block", 50 * MIB)]
    prices = Prices({"block": only}, moments, StepCosts(1.0, 0.0, 0), {}, {}, {}, 0, 1, False)
    corrected = Corrected(prices, LIMIT_BYTES)
    assert corrected.decide() is not None
    assert corrected.decide(without=without) is None


class MachineThatSlowsDown(ByTurns):
    """Each trial takes longer than the one before, and more so than decisions differ. By turns, the machine slows down
    from turn to turn."""

    def __init__(self, seconds: dict[str, float], returned_bytes: dict[str, int]) -> None:
        self._seconds, self._returned_bytes = seconds, returned_bytes
        self._slowness = 1.0

    def take(self, decision: Decision, _: Prices) -> MeasuredStep:
        kind = decision.actions["block"].kind
        self._slowness *= 1.08
        return MeasuredStep(self._slowness * self._seconds[kind], decision.peak_bytes, self._returned_bytes[kind])

    def take_by_turns(self, decisions: list[Decision], _: Prices) -> list[list[MeasuredStep]]:
        kinds = [decision.actions["block"].kind for decision in decisions]
        return [
            [MeasuredStep(slow * self._seconds[kind], 50 * MIB, self._returned_bytes[kind]) for slow in (1, 1.4, 1.8)]
            for kind in kinds
        ]


@pytest.mark.parametrize(
    ("store_seconds", "store_returns", "best_action"),
    [(1.0, 0, STORE), (1.04, 0, RECOMPUTE), (1.01, 0, STORE), (0.99, MIB, RECOMPUTE)],
    ids=["faster", "slower", "as fast", "as fast, but memory is short"],
)
def test_choices_whose_trials_tell_little_apart_take_turns(
    corrected: Corrected, store_seconds: float, store_returns: int, best_action: Action
) -> None:
    """To store is tried first, when the machine is faster. What is computed again took 1 s before, without holes."""
    known = TriedDecision(corrected.prices.uniform(RECOMPUTE), MeasuredStep(1.0, 50 * MIB))
    returned_bytes = {"store": store_returns, "recompute": 0 if store_returns else MIB}
    trials = MachineThatSlowsDown({"store": store_seconds, "recompute": 1.0}, returned_bytes)
    best = choose(trials, corrected, LIMIT_BYTES, [known])  # type: ignore[arg-type]
    assert best is not None
    assert best.decision.actions == {"block": best_action}


def test_choice_whose_steps_by_turns_exceed_the_limit_is_not_taken(corrected: Corrected) -> None:
    class Exceeding(Measured):
        def take_by_turns(self, decisions: list[Decision], prices: Prices) -> list[list[MeasuredStep]]:
            steps = super().take_by_turns(decisions, prices)
            return [
                [step._replace(peak_bytes=LIMIT_BYTES + (decision.actions["block"] == STORE)) for step in own]
                for decision, own in zip(decisions, steps, strict=True)
            ]

    known = TriedDecision(corrected.prices.uniform(RECOMPUTE), MeasuredStep(1.0, 50 * MIB))
    best = choose(Exceeding({"store": 1.0, "recompute": 1.05}), corrected, LIMIT_BYTES, [known])  # type: ignore[arg-type]
    assert best is not None
    assert best.decision.actions == {"block": RECOMPUTE}

"""The solver's choice, against all choices of small problems."""

from __future__ import annotations

import itertools
import random

import pytest

from tierstore.memory_plan.decision import NARROW_BYTES, Action, Decision, HeldOutput, Moment, Option, Prices, StepCosts

MIB = 2**20
GAP = 2e-3


def random_prices(rng: random.Random) -> Prices:
    """Blocks in forward and backward order, some called twice; neighbours share storages."""
    names = [f"block {number}" for number in range(rng.randint(1, 5))]
    sizes = {storage: rng.randint(1, 64) * MIB for storage in range(12)}
    options = {}
    for name in names:
        saved = rng.sample(sorted(sizes), rng.randint(1, 5))
        inputs = rng.sample(sorted(sizes), rng.randint(1, 2))
        options[name] = [
            option(Action("keep"), saved, [], sizes),
            option(Action("store"), [], saved, sizes),
            option(Action("recompute"), inputs, [], sizes, rng.random()),
            option(Action("recompute", stores=True), [], inputs, sizes, rng.random()),
        ][: rng.choice([2, 4])]
        if len(options[name]) == 4:
            held = (HeldOutput(0, "aten.mm.default"),)
            options[name].append(option(Action("recompute", held), [*inputs, saved[0]], [], sizes, rng.random() / 2))
    called = [*names, *rng.sample(names, rng.randint(0, 1))]
    moments = [Moment(rng.randint(0, 32) * MIB, frozenset())]
    for number, name in enumerate(called):
        moments.append(moment(rng, frozenset(called[: number + 1]), name))
    backward = reversed(range(len(called)))
    moments += [moment(rng, frozenset(called[:number]), called[number]) for number in backward]
    store_bytes = rng.randint(0, 32) * MIB
    costs = StepCosts(1 + rng.random(), rng.random() / (64 * MIB), store_bytes)
    return Prices(options, moments, costs, spared_bytes=store_bytes // 2)


def option(action: Action, kept: list[int], stored: list[int], sizes: dict[int, int], seconds: float = 0.0) -> Option:
    return Option(action, {name: sizes[name] for name in kept}, {name: sizes[name] for name in stored}, seconds)


def moment(rng: random.Random, holders: frozenset[str], block: str) -> Moment:
    return Moment(rng.randint(0, 64) * MIB, holders, block, rng.randint(0, 64) * MIB)


def all_decisions(prices: Prices) -> list[Decision]:
    """Counted here by themselves: which storages there are at each moment, and which are stored."""
    found, costs = [], prices.costs
    for chosen in itertools.product(*prices.options.values()):
        by_name = dict(zip(prices.options, chosen, strict=True))
        stored = {name: size for one in chosen for name, size in one.stored.items()}
        peak_bytes = 0
        for at in prices.moments:
            kept = {name: size for holder in at.holders for name, size in by_name[holder].kept.items()}
            is_storing = at.block is not None and by_name[at.block].action.kind == "store"
            peak_bytes = max(peak_bytes, sum(kept.values()) + (at.stored_bytes if is_storing else at.bytes))
        peak_bytes += costs.store_bytes if stored else 0
        added_seconds = sum(one.seconds for one in chosen) + costs.store_seconds * sum(stored.values())
        found.append(Decision(by_name, peak_bytes, costs.step_seconds + added_seconds, sum(stored.values())))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_fastest_choice_within_every_limit_and_that_of_the_least_peak(seed: int) -> None:
    prices = random_prices(random.Random(seed))
    decisions = all_decisions(prices)
    peaks = sorted({decision.peak_bytes for decision in decisions})
    for limit_bytes in (peaks[0] - MIB, *peaks[:: max(len(peaks) // 4, 1)], peaks[-1] + MIB):
        fitting = [decision for decision in decisions if decision.peak_bytes <= limit_bytes]
        found = prices.decide(limit_bytes)
        if found is None:
            assert not fitting
            continue
        best_seconds = min(decision.step_seconds for decision in fitting)
        assert found.peak_bytes <= limit_bytes
        assert found.step_seconds <= best_seconds * (1 + GAP)
        assert found == prices.decision_of(found.chosen)
    for each in (prices, prices.narrow()):
        least_bytes = min(decision.peak_bytes for decision in all_decisions(each))
        found = each.decide(None)
        assert found is not None
        assert found.peak_bytes <= least_bytes * (1 + GAP)


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_what_a_decision_costs(seed: int, is_narrow: bool) -> None:
    wide = random_prices(random.Random(seed))
    prices = wide.narrow() if is_narrow else wide
    assert wide.costs.store_bytes - prices.costs.store_bytes == is_narrow * wide.spared_bytes
    for expected in all_decisions(prices):
        found = prices.decision_of(expected.chosen)
        is_said = is_narrow and found.stored_bytes > 0 and wide.spared_bytes > 0
        assert found.staging_bytes == (NARROW_BYTES if is_said else None)
        assert (found.peak_bytes, found.stored_bytes) == (expected.peak_bytes, expected.stored_bytes)
        assert found.step_seconds == pytest.approx(expected.step_seconds)

"""Many known graphs that begin alike: the plan of each, and what it costs to find it."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.ledger.lookahead import LearnedOrders
from tierstore.ledger.plan import Plan, PlannedTier, TierBudgets, Trace

NUM_GRAPHS, NUM_PACKS, CELL_PACKS = 64, 3008, 47
BUDGETS = TierBudgets(200, 0, 100)
_BITS = {0: None, 1: PlannedTier.DEVICE, 2: PlannedTier.HOST, 4: PlannedTier.STAGING, 8: PlannedTier.DISK}


class _Rule:
    """What `LearnedOrders` is to predict, found by comparing each graph with each other one, pack by pack."""

    def __init__(self) -> None:
        self._traces: list[Trace] = []  # the one that was used last comes last

    def learn(self, trace: Trace) -> None:
        known = self._of(trace.signatures[-1])
        if known is None or not (trace == known or trace.ends_within(known)):
            self._traces = [each for each in self._traces if each is not known]
            self._traces.append(trace)
        self.recall(trace.signatures[-1])
        self._traces = self._traces[-NUM_GRAPHS:]

    def recall(self, signature: int) -> None:
        self._traces.sort(key=lambda trace: trace.signatures[-1] == signature)

    def predict(self, num_packs: int, signature: int, budgets: TierBudgets) -> tuple[Any, ...]:
        beginning = [trace for trace in self._traces if trace.continues(num_packs, signature)]
        if not beginning:
            return (None,)
        trace = beginning[-1]
        tiers = [_BITS[bit] for bit in trace.tiers(budgets)]
        is_needed = trace.exceeds(budgets)
        for other in self._traces:
            for index, (mine, theirs) in enumerate(zip(trace.signatures, other.signatures, strict=False)):
                if mine != theirs:
                    break
                if _BITS[other.tiers(budgets)[index]] is not _BITS[trace.tiers(budgets)[index]]:
                    tiers[index] = None
        return trace, tiers, is_needed

    def _of(self, signature: int) -> Trace | None:
        return next((trace for trace in self._traces if trace.signatures[-1] == signature), None)


def _trace(sizes: Sequence[int], order: Sequence[int] | None = None, on_device: bool = False) -> Trace:
    signature, signatures = 0, []
    for size in sizes:
        signature = hash((signature, size))
        signatures.append(signature)
    num = range(len(sizes))
    return Trace(signatures, num, sizes, [on_device] * len(sizes), reversed(num) if order is None else order)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32))
def test_predictions_are_those_of_comparing_each_graph_with_each_other(seed: int) -> None:
    """Short graphs of few sizes: most are the beginning of others. More are learned than are remembered."""
    orders, rule, chance = LearnedOrders(), _Rule(), random.Random(seed)
    for number in range(150):
        graph = [chance.randint(1, 2) for _ in range(chance.randint(1, 8))]
        order = chance.sample(range(len(graph)), chance.randint(1, len(graph)))
        trace = _trace(graph, order, on_device=chance.random() < 0.3)
        if chance.random() < 0.8:
            orders.learn(trace)
            rule.learn(trace)
        else:
            orders.recall(trace.signatures[-1])
            rule.recall(trace.signatures[-1])
        if number % 4:
            continue
        budgets = TierBudgets(chance.randint(0, 6), chance.randint(0, 3), chance.randint(0, 3))
        probe = _trace([chance.randint(1, 2) for _ in range(9)])
        for num_packs, signature in enumerate(probe.signatures, 1):
            plan = orders.predict(num_packs, signature, *budgets)
            assert _told(plan, chance) == rule.predict(num_packs, signature, budgets)


def _told(plan: Plan | None, chance: random.Random) -> tuple[Any, ...]:
    """The tiers are asked for in any order."""
    if plan is None:
        return (None,)
    tiers: list[PlannedTier | None] = [None] * len(plan.trace)
    for index in chance.sample(range(len(tiers)), len(tiers)):
        tiers[index] = plan.tier(index)
    return plan.trace, tiers, plan.is_needed


def _cells(num_cells: int) -> Trace:
    return _trace([1 + index % CELL_PACKS for index in range(num_cells * CELL_PACKS)])


def _follow(orders: LearnedOrders, signatures: Sequence[int]) -> int:
    """What forward asks for as it packs a graph. Returns how many plans it got."""
    num_plans, plan = 0, None
    for index, signature in enumerate(signatures):
        if plan is None or not plan.trace.continues(index + 1, signature):
            plan = orders.predict(index + 1, signature, *BUDGETS)
            assert plan is not None
            num_plans += 1
        plan.leaves(index)
    return num_plans


class _Calls(NamedTuple):
    by_name: dict[str, int]

    def num(self, name: str) -> int:
        return self.by_name.get(name, 0)


@contextmanager
def _counted() -> Iterator[_Calls]:
    calls = _Calls({})

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            name = frame.f_code.co_name if event == "call" else argument.__name__
            calls.by_name[name] = calls.num(name) + 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def test_each_graph_of_many_lengths_is_looked_at_once_not_once_for_each_other() -> None:
    orders = LearnedOrders()
    for num_cells in range(NUM_GRAPHS, 0, -1):
        orders.learn(_cells(num_cells))
    longest = _cells(NUM_GRAPHS).signatures
    assert len(longest) == NUM_PACKS
    with _counted() as calls:
        assert _follow(orders, longest) == NUM_GRAPHS
    assert calls.num("_planned_tiers") == NUM_GRAPHS
    with _counted() as calls:
        assert _follow(orders, longest) == NUM_GRAPHS
    assert calls.num("_planned_tiers") == 0
    assert calls.num("from_bytes") == 0, "what they agree on is found again"
    assert orders.predict(1, longest[0], *BUDGETS) is orders.predict(1, longest[0], *BUDGETS)


def test_length_that_is_new_leaves_what_is_known_of_the_others() -> None:
    """The least recently used is forgotten for it. Only the new one is looked at pack by pack."""
    orders = LearnedOrders()
    for num_cells in range(NUM_GRAPHS + 1, 1, -1):
        orders.learn(_cells(num_cells))
    longest = _cells(NUM_GRAPHS).signatures
    _follow(orders, longest)
    new = _cells(1)
    with _counted() as calls:
        orders.learn(new)
        num_plans = _follow(orders, longest)
    assert num_plans == NUM_GRAPHS
    assert calls.num("_planned_tiers") == 1
    assert calls.num("from_bytes") < NUM_GRAPHS * NUM_GRAPHS, "each pair of graphs may be compared once, not all packs"
    with _counted() as calls:
        orders.predict(1, longest[0], *BUDGETS)
    assert sum(calls.by_name.values()) < 4 * NUM_GRAPHS


def test_auto_each_graph_keeps_what_was_found_for_itself() -> None:
    """Where another graph may come instead, a tensor is decided only if that one would send it away, too."""
    orders = LearnedOrders()
    long, short = _trace([1] * 6, on_device=True), _trace([1] * 3, on_device=True)
    for trace, staying_bytes in ((short, 1), (long, 4)):
        orders.learn(trace)
        orders.coverage.note(trace.measurable, _times(staying_bytes))

    def tiers() -> list[PlannedTier | None]:
        plan = orders.predict(6, long.signatures[-1], 100, None)
        assert plan is not None
        return [plan.tier(index) for index in range(6)]

    device, host = PlannedTier.DEVICE, PlannedTier.HOST
    assert tiers() == [host, host, device, device, device, device]
    orders.coverage.note(short.measurable, _times(2))
    assert tiers() == [host, None, device, device, device, device]


def _times(uncovered_bytes: int) -> Any:
    measured = SimpleNamespace(uncovered_bytes=lambda: uncovered_bytes)
    return SimpleNamespace(
        staying_bytes=0,
        refused_bytes=0,
        end=lambda: None,
        is_over=lambda: True,
        measured=lambda: measured,
        spare_bytes=lambda: None,
    )

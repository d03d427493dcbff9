"""The order of what backward asks for, and how far ahead of it to look."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.ledger.graph_order import Budgets, GraphOrder, Packs
from tierstore.ledger.lookahead import LearnedOrders, Lookahead, reverse_topological
from tierstore.ledger.plan import PlannedTier, Trace
from tierstore.ledger.state import State


def _records(num: int) -> list[Any]:
    return [SimpleNamespace(key=key) for key in range(num)]


@given(st.lists(st.integers(0, 20), max_size=40))
def test_reverse_topological_takes_nodes_backwards_and_their_tensors_forwards(nodes: list[int]) -> None:
    nodes.sort()  # autograd numbers them as they come
    order = reverse_topological(nodes)
    assert sorted(order) == list(range(len(nodes)))
    for earlier, later in pairwise(order):
        assert nodes[earlier] > nodes[later] or (nodes[earlier] == nodes[later] and earlier < later)


def _trace(signatures: Sequence[int], order: Iterable[int], size: int = 1) -> Trace:
    num = len(signatures)
    return Trace(signatures, range(num), [size] * num, [False] * num, order)


def _order_of(trace: Trace | None) -> list[int]:
    assert trace is not None
    return list(trace.order)


def test_learned_order_is_not_replaced_by_a_backward_that_ended_in_its_midst() -> None:
    orders = LearnedOrders()
    orders.learn(_trace([7, 8, 1], [2, 0, 1]))
    orders.learn(_trace([7, 8, 1], [2, 0]))
    assert _order_of(orders.recall(1)) == [2, 0, 1]
    orders.learn(_trace([7, 8, 1], [2, 1]))
    assert _order_of(orders.recall(1)) == [2, 1]


@pytest.mark.parametrize("touch", ["learn", "recall"])
def test_learned_order_used_all_the_time_is_never_forgotten(touch: str) -> None:
    orders = LearnedOrders()
    orders.learn(_trace([-1], [0]))
    for signature in range(500):
        orders.learn(_trace([signature], [0]))
        if touch == "learn":
            orders.learn(_trace([-1], [0]))
        assert orders.recall(-1) is not None
    assert orders.recall(499) is not None
    assert orders.recall(0) is None, "it grows without end"


def test_learned_orders_of_huge_graphs_are_fewer() -> None:
    orders = LearnedOrders()
    for first in range(4):
        orders.learn(_trace(range(first * 10**6, first * 10**6 + 100_000), [0]))
    known = [orders.recall(first * 10**6 + 99_999) is not None for first in range(4)]
    assert known == [False, False, True, True]
    orders.learn(_trace(range(10**7, 10**7 + 300_000), [0]))
    assert orders.recall(10**7 + 299_999) is not None, "the newest one stays, however large"
    assert orders.recall(3 * 10**6 + 99_999) is None


def _order_over(orders: LearnedOrders, host_bytes: int) -> GraphOrder[Any]:
    return GraphOrder(orders, Budgets(host_bytes, 0, 0), lookahead_bytes=100, depth_bytes=100)


def _packs(sizes: Sequence[int]) -> Packs[Any]:
    records = [SimpleNamespace(key=key, state=State.DISK, shared=False) for key in range(len(sizes))]
    num = range(len(sizes))
    return Packs(list(num), sizes, records, list(num), [False] * len(sizes))


def test_graph_of_new_sizes_follows_one_with_the_same_nodes() -> None:
    """What stays is the share that the budget holds now; backward is expected to ask as it did."""
    orders = LearnedOrders()
    known, packs = _order_over(orders, 20), _packs([10, 10, 10, 10])
    known.look_ahead(packs, packs.records)
    known.asked_for.update(dict.fromkeys([1, 3, 0, 2]))
    ending = known.ending(None)
    assert ending is not None
    ending()
    order, packs = _order_over(orders, 20), _packs([5, 5, 5, 5])
    assert order.follow(0, [(0, 5)], 0) == 0
    assert order.follow(1, [(1, 5), (2, 5), (3, 5)], 0) == 3
    assert order.predicted is not None
    assert order.plan is None, "all of it may stay"
    order.look_ahead(packs, packs.records)
    assert order.lookahead.peek() is packs.records[1]
    order = _order_over(orders, 20)
    order.follow(0, [(0, 20)], 0)
    assert order.plan is not None
    assert [order.plan.tier(index) for index in (1, 3, 0, 2)] == [PlannedTier.HOST, *[PlannedTier.DISK] * 3]
    assert order.follow(1, [(7, 20), (8, 20)], 0) == 0, "another node"
    assert order.predicted is None


def test_lookahead_takes_an_order_that_leaves_some_out() -> None:
    ahead, records = Lookahead(100), _records(4)
    ahead.begin(records, [3, 0])
    ahead.asked_for(2)
    assert ahead.peek() is records[3]
    ahead.advance(1)
    assert ahead.peek() is records[0]
    ahead.advance(1)
    assert ahead.peek() is None


@given(st.data())
def test_lookahead_never_holds_more_than_the_limit_and_one_record(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 15))
    sizes = data.draw(st.lists(st.integers(0, 50), min_size=num, max_size=num))
    order = data.draw(st.permutations(range(num)))
    asked = data.draw(st.lists(st.integers(0, num - 1), max_size=20))
    limit = data.draw(st.integers(0, 120))
    ahead, records = Lookahead(limit), _records(num)
    ahead.begin(records, order)
    fetched: dict[int, int] = {}
    position, before = 0, set[int]()
    for index in asked:
        ahead.asked_for(index)
        fetched.pop(index, None)
        after = order.index(index) + 1
        position = after if index in before else max(position, after)
        before.add(index)
        while (record := ahead.peek()) is not None:
            assert sum(fetched.values()) < limit
            assert record.key == order[position]
            position += 1
            newly_fetched = 0 if record.key in fetched else sizes[record.key]
            ahead.advance(newly_fetched)
            if newly_fetched:
                fetched[record.key] = newly_fetched
        assert sum(fetched.values()) < limit + max(sizes) or limit == 0
        assert position == num or sum(fetched.values()) >= limit


def test_lookahead_comes_back_for_what_has_left_memory() -> None:
    ahead, records = Lookahead(100), _records(5)
    ahead.begin(records, [4, 3, 2, 1, 0])
    ahead.asked_for(4)
    for _ in range(3):
        ahead.advance(30)
    ahead.come_back_for(records[0])
    assert ahead.peek() is records[0], "it was not dealt with yet"
    ahead.come_back_for(records[4])
    assert ahead.peek() is records[0], "it was asked for already"
    ahead.come_back_for(records[2])
    assert ahead.peek() is records[2]
    ahead.advance(30)
    ahead.advance(0)
    assert ahead.peek() is records[0]
    ahead.advance(10)
    assert ahead.peek() is None
    assert ahead._ahead_bytes == 100


def test_retained_graph_asked_for_again_what_stays_in_memory_is_passed_once_each_time() -> None:
    num, times = 100, 3
    ahead, records = Lookahead(100), _records(num)
    ahead.begin(records, range(num))
    num_passed = 0
    for _ in range(times):
        for index in range(num):
            ahead.asked_for(index, knows_dropped=True)
            while ahead.peek() is not None:
                ahead.advance(0)
                num_passed += 1
    assert num_passed == times * (num - 1), "all but the first, in each backward"


def test_retained_graph_asked_for_again_looks_anew_for_what_it_was_not_told_of() -> None:
    ahead, records = Lookahead(100), _records(4)
    ahead.begin(records, range(4))
    for index in (0, 1, 2, 3, 0):
        ahead.asked_for(index, knows_dropped=True)
    for _ in range(3):
        ahead.advance(0)
    ahead.asked_for(1, knows_dropped=True)
    assert ahead.peek() is None
    ahead.asked_for(2, knows_dropped=False)
    assert ahead.peek() is records[3], "it may have left memory"


def test_lookahead_knows_what_is_needed_before_what_it_fetches() -> None:
    ahead = Lookahead(100)
    first, second, third = _records(3)
    ahead.begin([third, second, first, first], [3, 2, 1, 0])
    ahead.asked_for(3)
    assert ahead.needs_first(first), "it is being asked for"
    assert [ahead.next_rank(record) for record in (first, second, third)] == [0, 2, 3]
    ahead.advance(0)
    assert ahead.peek() is second
    assert ahead.needs_first(first)
    ahead.asked_for(2)
    ahead.asked_for(1)
    assert not ahead.needs_first(first)
    assert not ahead.needs_first(third)
    assert [ahead.next_rank(record) for record in (first, second, third)] == [math.inf, 2, 3]


def test_lookahead_knows_records_that_come_in_later() -> None:
    ahead = Lookahead(100)
    first, second, third = _records(3)
    records = [first, None, None, third]
    ahead.begin(records, [3, 2, 1, 0])
    ahead.asked_for(3)
    for fetched_bytes in (30, 30):
        assert ahead.peek() is first
        ahead.advance(fetched_bytes)
        ahead.come_back_for(second)
        ahead.come_back_for(first)
    for index in (1, 2):
        records[index] = second
        ahead.come_in((index,), second)
    ahead.come_back_for(second)
    assert ahead.peek() is second
    assert ahead.needs_first(third)
    assert not ahead.needs_first(second)

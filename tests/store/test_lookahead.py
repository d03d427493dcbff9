"""The order of what backward asks for, and how far ahead of it to look."""

from __future__ import annotations

import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.lookahead import LearnedOrders, Lookahead, reverse_topological


def _records(num: int) -> list[Any]:
    return [SimpleNamespace(key=key) for key in range(num)]


@given(st.lists(st.integers(0, 20), max_size=40))
def test_reverse_topological_takes_nodes_backwards_and_their_tensors_forwards(nodes: list[int]) -> None:
    nodes.sort()  # autograd numbers them as they come
    order = reverse_topological(nodes)
    assert sorted(order) == list(range(len(nodes)))
    for earlier, later in pairwise(order):
        assert nodes[earlier] > nodes[later] or (nodes[earlier] == nodes[later] and earlier < later)


def test_reverse_topological_of_a_chain() -> None:
    assert reverse_topological([3, 3, 5, 9, 9, 9]) == [3, 4, 5, 2, 0, 1]


def test_learned_order_is_recalled_and_replaced() -> None:
    orders = LearnedOrders()
    assert orders.recall(1) is None
    order = [2, 0, 1]
    orders.learn(1, order)
    order.clear()
    assert orders.recall(1) == (2, 0, 1)
    orders.learn(1, [1, 0, 2])
    assert orders.recall(1) == (1, 0, 2)


@pytest.mark.parametrize("touch", ["learn", "recall"])
def test_learned_order_used_all_the_time_is_never_forgotten(touch: str) -> None:
    orders = LearnedOrders()
    orders.learn(-1, [0])
    for signature in range(500):
        orders.learn(signature, [signature])
        if touch == "learn":
            orders.learn(-1, [0])
        assert orders.recall(-1) == (0,)
    assert orders.recall(499) == (499,)
    assert orders.recall(0) is None, "it grows without end"


def test_learned_orders_from_many_threads_lose_no_thread() -> None:
    orders = LearnedOrders()
    errors: list[BaseException] = []

    def use(first: int) -> None:
        try:
            for signature in range(first, first + 400):
                orders.learn(signature % 97 + first, range(signature % 7))
                orders.recall(signature % 89)
        except BaseException as error:  # noqa: BLE001 - for the main thread
            errors.append(error)

    threads = [threading.Thread(target=use, args=(1000 * i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors


def test_lookahead_before_it_begins_has_nothing() -> None:
    assert Lookahead(100).peek() is None


def test_lookahead_of_no_bytes_never_looks() -> None:
    ahead, records = Lookahead(0), _records(3)
    ahead.begin(records, [2, 1, 0])
    ahead.asked_for(2)
    assert ahead.peek() is None


def test_lookahead_stops_at_its_limit_and_goes_on_as_asked() -> None:
    ahead, records = Lookahead(100), _records(5)
    ahead.begin(records, [4, 3, 2, 1, 0])
    for index in (4, 3):
        assert ahead.peek() is records[index]
        ahead.advance(60)
    assert ahead.peek() is None
    ahead.asked_for(4)
    assert ahead.peek() is records[2]
    ahead.advance(0)
    assert ahead.peek() is records[1]


def test_lookahead_skips_what_was_asked_for_out_of_turn() -> None:
    ahead, records = Lookahead(100), _records(5)
    ahead.begin(records, [4, 3, 2, 1, 0])
    ahead.asked_for(2)
    assert ahead.peek() is records[1]
    ahead.asked_for(4)
    assert ahead.peek() is records[1]


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


def test_lookahead_begins_again_where_a_graph_is_gone_through_again() -> None:
    ahead, records = Lookahead(100), _records(4)
    ahead.begin(records, [3, 2, 1, 0])
    for index in (3, 2, 1, 0):
        ahead.asked_for(index)
    assert ahead.peek() is None
    ahead.asked_for(3)
    assert ahead.peek() is records[2]


def test_lookahead_does_not_go_back_for_what_is_asked_for_late() -> None:
    ahead, records = Lookahead(100), _records(4)
    ahead.begin(records, [3, 2, 1, 0])
    ahead.asked_for(1)
    ahead.asked_for(3)
    assert ahead.peek() is records[0]


def test_lookahead_asked_for_what_was_packed_after_it_began_stays_where_it_is() -> None:
    """Another thread may be packing just then."""
    ahead, records = Lookahead(100), _records(2)
    ahead.begin(records, [1, 0])
    ahead.asked_for(2)
    assert ahead.peek() is records[1]

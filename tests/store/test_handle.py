"""The table of states and legal moves, and what a handle and its record do by themselves."""

import re
import weakref
from collections import deque
from itertools import product

import pytest
import torch

import tierstore.ledger.state
from tests.store.records import made_handle
from tierstore.ledger.state import MOVES, State
from tierstore.residency.handle import Record
from tierstore.tensors.layout import layout_of


def _record_in(state: State) -> Record:
    """By the shortest legal way from the beginning. Its handle is gone."""
    ways: dict[State, list[State]] = {State.PENDING: []}
    queue = deque([State.PENDING])
    while queue:
        here = queue.popleft()
        for there in sorted(MOVES[here], key=lambda state: state.value):
            if there not in ways:
                ways[there] = [*ways[here], there]
                queue.append(there)
    record = made_handle(torch.empty(10)).record
    for step in ways[state]:
        record.move(step)
    return record


def test_move_in_the_table_is_made_any_other_refused() -> None:
    for state, to in product(State, State):
        record = _record_in(state)
        if to in MOVES[state]:
            record.move(to)
            assert record.state is to
        else:
            with pytest.raises(RuntimeError, match=f"{state.name} → {to.name}"):
                record.move(to)
            assert record.state is state


def test_bytes_that_are_gone_never_come_back_without_a_read() -> None:
    for state in (State.DISK, State.FAILED, State.CLOSED, State.FREED):
        assert not MOVES[state] & {State.PENDING, State.DEVICE, State.HOST, State.QUEUED, State.WRITING, State.CLEAN}


def test_table_in_the_docstring_names_every_state() -> None:
    documented = re.findall(r"^([A-Z]+)  ", tierstore.ledger.state.__doc__ or "", re.MULTILINE)
    assert documented == [state.name for state in State]


def test_record_keeps_what_was_handed_out_as_long_as_its_handle_lives() -> None:
    handle = made_handle(torch.empty(10))
    record, view = handle.record, handle.source.view(2, 5)
    handle.keep_view(layout_of(view), view)
    assert record.views == {layout_of(view): view}
    record.drop_views()
    assert record.views == {}
    handle.keep_view(layout_of(view), view)
    memory = weakref.ref(view.untyped_storage())
    del handle
    assert memory() is not None
    del view
    assert memory() is None
    assert record.views == {}


def test_handle_dropped_frees_the_memory_at_once_and_queues_its_record() -> None:
    released: deque[Record] = deque()
    handle = made_handle(torch.empty(10), released=released)
    record, memory = handle.record, weakref.ref(handle.source.untyped_storage())
    assert record() is handle
    assert "pending" in repr(handle)
    del handle
    assert list(released) == [record]
    assert memory() is None
    assert record.source is None
    assert record.state is State.PENDING
    assert record() is None

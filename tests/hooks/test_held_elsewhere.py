"""Tensors on an accelerator that the program holds too: tracked like others, without a charge. NOTE [Held elsewhere] in
`tierstore/ledger/on_device.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import MakeStore
from tests.device.fake import SeenDevice
from tests.hooks.granted import NBYTES, SIDE, lock_held_by_another, new_leaf, sines
from tests.hooks.programs import bits, forget_after_error, in_threads
from tests.inspect_store import inspect
from tierstore import ModifiedInPlaceError, TierStore, tiered_offload

_STAYS = "64MiB"
_NUM_LAYERS = 6


@pytest.fixture
def store(make_store: MakeStore, copies: SeenDevice) -> TierStore:
    return make_store(host_bytes="64MiB", copies=copies)


def _scope(store: TierStore, device_bytes: int | str = _STAYS) -> tiered_offload:
    return tiered_offload(store, min_bytes=0, device_bytes=device_bytes)


def _charged(store: TierStore) -> int:
    """Also by packs that were not entered yet; nothing is registered."""
    return inspect(store).device_window.resident.used_bytes


def _table() -> torch.Tensor:
    """As a module's buffer: each layer saves it, and the program holds it."""
    return torch.linspace(0.5, 1.5, SIDE * SIDE).reshape(SIDE, SIDE)


def _layers(x: torch.Tensor, table: torch.Tensor, number: int = _NUM_LAYERS, between: Any = None) -> torch.Tensor:
    """Each saves the table, a product, and two views of one storage. `between`: called within each layer."""
    for layer in range(number):
        left, right = (x * table).sin().chunk(2, -1)
        x = torch.cat((right.cos(), left.sin()), -1)
        if between is not None:
            x = between(layer, x)
    return x


def _bytes_of(number: int) -> int:
    return 2 * number * NBYTES


def _expected(table: torch.Tensor, number: int = _NUM_LAYERS, between: Any = None) -> Any:
    leaf = new_leaf()
    _layers(leaf * 2, table, number, between).sum().backward()
    return bits(leaf.grad)


def _totals(store: TierStore) -> tuple[object, ...]:
    stats = store.stats()
    assert (stats.device_bytes, stats.live_handles) == (0, 0)
    assert (_charged(store), inspect(store).device_window.resident.granted_bytes) == (0, 0)
    return stats.packed_tensors, stats.packed_bytes, stats.deduplicated_bytes, dict(stats.kept_bytes)


@pytest.mark.parametrize("asks", ["in forward", "after forward", "after each step"])
def test_buffer_takes_no_room_and_all_figures_are_those_of_a_store_that_registers_it(
    make_store: MakeStore, copies: SeenDevice, asks: str
) -> None:
    """`stats` registers whatever is settled. Its figures are the same, whenever it is asked; a step has two scopes."""
    table, totals = _table(), []
    for is_asked in (False, True):
        store = make_store(host_bytes="64MiB", copies=copies)

        def ask(layer: int, x: torch.Tensor, store: TierStore = store, is_asked: bool = is_asked) -> torch.Tensor:
            if is_asked and asks == "in forward":
                assert store.stats().device_bytes <= _bytes_of(_NUM_LAYERS)
            return x

        for _ in range(4):
            leaf = new_leaf()
            with _scope(store):
                hidden = _layers(leaf * 2, table, _NUM_LAYERS // 2)
            with _scope(store):
                loss = _layers(hidden, table, _NUM_LAYERS // 2, ask).sum()
            del hidden
            if not is_asked:
                assert _charged(store) == _bytes_of(_NUM_LAYERS)
                assert inspect(store).records == []
            elif asks != "after each step":
                assert store.stats().device_bytes == _bytes_of(_NUM_LAYERS)
            loss.backward()
            del loss
            assert bits(leaf.grad) == _expected(table)
            if is_asked and asks == "after each step":
                store.stats()
        totals.append(_totals(store))
    assert totals[0] == totals[1]
    assert totals[0][3]["alive elsewhere"] == 4 * NBYTES


def test_buffer_is_packed_without_the_lock_even_after_it_had_a_record(store: TierStore) -> None:
    table, held, other = _table(), list[torch.Tensor](), new_leaf()
    for asks in (True, False):
        leaf = new_leaf()
        with _scope(store), lock_held_by_another(store, lambda: held.append((other * 2).sin())):
            loss = _layers(leaf * 2, table).sum()
        if asks:
            store.stats()
            assert [record.shared for record in inspect(store).records].count(True) == 1
        else:
            assert inspect(store).records == []
        loss.backward()
        assert bits(leaf.grad) == _expected(table)
        held.clear()
        del loss


def test_graph_dropped_while_another_of_its_log_lives_what_it_shared_counts_as_kept(store: TierStore) -> None:
    tables, leaf = [_table(), _table()], new_leaf()
    with _scope(store):
        losses = [_layers(leaf * 2, table).sum() for table in tables]
    assert _charged(store) == 2 * _bytes_of(_NUM_LAYERS)
    del losses[0]
    stats = store.stats()
    assert (stats.device_bytes, stats.kept_bytes["alive elsewhere"]) == (_bytes_of(_NUM_LAYERS), NBYTES)
    losses.pop().backward()
    assert bits(leaf.grad) == _expected(tables[1])
    assert _totals(store)[3]["alive elsewhere"] == 2 * NBYTES


@pytest.mark.parametrize("dropped", ["in forward", "after forward"])
def test_buffer_dropped_by_the_program_is_charged_at_the_next_look(store: TierStore, dropped: str) -> None:
    tables, leaf = [_table()], new_leaf()
    expected = _expected(tables[0], 2)
    with _scope(store):
        hidden = _layers(leaf * 2, tables[0], 1)
    assert _charged(store) == _bytes_of(1)
    if dropped == "in forward":
        with _scope(store):
            hidden = _layers(hidden, tables.pop(), 1)
    else:
        with _scope(store):
            hidden = _layers(hidden, tables[0], 1)
        assert _charged(store) == _bytes_of(2)
        tables.clear()
        inspect(store).residency.begin_backward(_log_of(store))
    assert _charged(store) == _bytes_of(2) + NBYTES
    hidden.sum().backward()
    assert bits(leaf.grad) == expected
    del hidden
    assert _totals(store)[3]["alive elsewhere"] == 0


def _log_of(store: TierStore) -> Any:
    (log,) = {tracked.log for tracked in inspect(store).tracked}
    return log


def test_output_of_a_scope_that_the_next_saves_too_is_charged_once_when_it_is_let_go(store: TierStore) -> None:
    """As where each block of a model has a scope: at its end the caller holds its output."""
    leaf = new_leaf()
    hidden = leaf * 2
    for number in range(1, 6):
        with _scope(store):
            hidden = hidden.sigmoid()  # saves its result
        assert _charged(store) == (number - 1) * NBYTES
    with _scope(store):
        hidden = hidden.sigmoid().sin()
    assert _charged(store) == 6 * NBYTES
    assert inspect(store).records == []
    hidden.sum().backward()
    del hidden
    assert _totals(store)[3]["alive elsewhere"] == 0


def test_storage_that_two_graphs_have_saved_is_charged_when_the_program_drops_it(store: TierStore) -> None:
    tables, losses = [_table()], list[torch.Tensor]()

    def pack() -> None:
        with _scope(store):
            losses.append((new_leaf() * tables[0]).sum())

    pack()
    in_threads(pack)  # another thread has a log of its own
    assert _charged(store) == 0
    tables.clear()
    for number, loss in enumerate(losses, 1):
        loss.backward(retain_graph=True)
        assert _charged(store) == number * NBYTES, "by each graph, as neither knows of the other"
    losses.clear()
    del loss
    assert _totals(store)[3]["alive elsewhere"] == 0


def test_window_becomes_short_the_buffer_stays_and_the_others_leave(store: TierStore, copies: SeenDevice) -> None:
    table, leaf = _table(), new_leaf()
    with _scope(store):
        loss = _layers(leaf * 2, table).sum()
    assert inspect(store).records == []
    inspect(store).residency.keep_on_device(0)
    stats = store.stats()
    assert stats.offloaded_bytes == _bytes_of(_NUM_LAYERS)
    assert [record.nbytes for record in inspect(store).records if record.shared] == [NBYTES]
    loss.backward()
    assert bits(leaf.grad) == _expected(table)
    del loss
    assert _totals(store)[3]["alive elsewhere"] == NBYTES


def test_known_graph_that_leaves_in_part_takes_no_room_for_the_buffer(store: TierStore) -> None:
    """Then it has a record, as what it takes is to be known when it is packed."""
    table = _table()
    storage_id = table.untyped_storage()._cdata

    def of_table() -> list[bool]:
        return [record.shared for record in inspect(store).records if record.storage_id == storage_id]

    for step in range(4):
        leaf = new_leaf()
        with _scope(store, _bytes_of(_NUM_LAYERS) // 2):
            hidden = _layers(leaf * 2, table, 1)
            assert len(of_table()) == (1 if step else 0)
            hidden = _layers(hidden, table, _NUM_LAYERS - 1)
        assert of_table() == [True]
        hidden.sum().backward()
        assert bits(leaf.grad) == _expected(table)
        del hidden
    assert _totals(store)[3]["alive elsewhere"] == 4 * NBYTES


@pytest.mark.parametrize("known", [False, True])
def test_edit_in_place_of_a_buffer_between_pack_and_backward_raises(store: TierStore, known: bool) -> None:
    table = _table()
    for is_edited in (False, True) if known else (True,):
        with _scope(store):
            loss = _layers(new_leaf() * 2, table).sum()
        if is_edited:
            table.add_(1)
            with pytest.raises(ModifiedInPlaceError):
                loss.backward()
            forget_after_error()
        else:
            loss.backward()
        del loss
    _totals(store)


def test_views_of_one_storage_are_charged_once_by_whatever_they_are_packed(store: TierStore) -> None:
    leaf = new_leaf()
    with _scope(store):
        hidden = (leaf * 2).sin()
        parts = [part.sin() for part in hidden.chunk(4, -1)]  # the first with the lock, the others by a grant
        inspect(store)  # ends it
        parts += [part.cos() for part in hidden.chunk(4, 0)]
        loss = torch.stack([part.sum() for part in parts]).sum()
        assert _charged(store) == 2 * NBYTES
    with _scope(store):  # one more scope, the same log
        loss = loss + hidden.cos().sum()
        assert _charged(store) == NBYTES, "the program holds the other"
        del hidden
    assert _charged(store) == 2 * NBYTES
    assert store.stats().device_bytes == 2 * NBYTES
    loss.backward()
    del loss, parts
    _totals(store)


@pytest.mark.parametrize("kind", ["of numpy", "shared"])
def test_memory_that_torch_does_not_own_stays_and_is_not_counted_as_ours(store: TierStore, kind: str) -> None:
    """In the middle of what is packed without the lock, of a graph that is known. It may not be freed, nor judged by
    its owners: those are not all torch's."""
    for _ in range(3):
        leaf = new_leaf()
        with _scope(store):
            hidden = sines(5, leaf * 2)
            memory = np.full((SIDE, SIDE), 0.5, np.float32)
            foreign = torch.from_numpy(memory) if kind == "of numpy" else torch.full((SIDE, SIDE), 0.5).share_memory_()
            hidden = sines(5, hidden * foreign)
            del foreign
        assert _charged(store) == 11 * NBYTES - NBYTES
        assert len(inspect(store).tracked) == 10
        loss = hidden.sum()
        del hidden
        loss.backward()
        del loss
    assert _totals(store)[3]["alive elsewhere"] == 3 * NBYTES


class _Tagged(torch.Tensor):
    """A subclass: it stays where it is, since its class comes back too."""


def _with_a_subclass(layer: int, x: torch.Tensor) -> torch.Tensor:
    return x if layer != 3 else torch.Tensor.as_subclass(x.as_subclass(_Tagged).sin(), torch.Tensor)


def _with_host_memory(layer: int, x: torch.Tensor) -> torch.Tensor:
    return x if layer != 3 else sines(2, x.reshape(-1, 2)).reshape(SIDE, SIDE)


def _other_stream(copies: SeenDevice, layer: int, x: torch.Tensor) -> torch.Tensor:
    copies.now = 0 if layer % 2 else 1
    return x


_BETWEEN = {
    "a subclass": lambda store, copies: _with_a_subclass,
    "host memory": lambda store, copies: _with_host_memory,
    "another stream": lambda store, copies: partial(_other_stream, copies),
    "stats": lambda store, copies: lambda layer, x: (store.stats(), x)[1],
    "flush": lambda store, copies: lambda layer, x: (store.flush(), x)[1],
    "a graph of its own": lambda store, copies: lambda layer, x: (sines(3, new_leaf() * 2).sum().backward(), x)[1],
    "a dropped graph": lambda store, copies: lambda layer, x: (sines(3, new_leaf() * 2), x)[1],
}


@pytest.mark.parametrize("name", _BETWEEN)
def test_known_graph_is_another_in_its_middle_same_bits_and_nothing_stays_charged(
    store: TierStore, copies: SeenDevice, name: str
) -> None:
    """As known, longer, shorter, and with something else between its layers."""
    table = _table()
    between: Callable[[int, torch.Tensor], torch.Tensor] = _BETWEEN[name](store, copies)
    for number, other in [(6, None), (6, None), (9, None), (6, between), (3, None), (6, between), (6, None)]:
        leaf = new_leaf()
        with _scope(store):
            loss = _layers(leaf * 2, table, number, other).sum()
            copies.now = 0
        if other is None:
            assert _charged(store) == _bytes_of(number)
        loss.backward()
        del loss
        assert bits(leaf.grad) == _expected(table, number, other)
    _totals(store)


def test_two_graphs_in_one_scope_begin_alike_each_is_charged_exactly(store: TierStore) -> None:
    table = _table()
    for numbers in [(4, 4), (4, 7), (7, 2)]:
        leaves, losses = [new_leaf() for _ in numbers], []
        with _scope(store):
            for leaf, number in zip(leaves, numbers, strict=True):
                losses.append(_layers(leaf * 2, table, number).sum())
        assert _charged(store) == sum(map(_bytes_of, numbers))
        for loss in losses:
            loss.backward()
        assert [bits(leaf.grad) for leaf in leaves] == [_expected(table, number) for number in numbers]
        losses.clear()
        del loss
    _totals(store)


def test_error_in_forward_everything_is_given_back(store: TierStore) -> None:
    def fail(layer: int, x: torch.Tensor) -> torch.Tensor:
        if layer == 3:
            raise ValueError
        return x

    table = _table()
    for _ in range(3):
        with suppress(ValueError), _scope(store):
            _layers(new_leaf() * 2, table, between=fail)
        leaf = new_leaf()
        with _scope(store):
            loss = _layers(leaf * 2, table).sum()
        loss.backward()
        assert bits(leaf.grad) == _expected(table)
        del loss
    _totals(store)


def test_store_closed_while_others_hold_a_saved_storage_nothing_is_charged(store: TierStore) -> None:
    table = _table()
    with _scope(store):
        loss = _layers(new_leaf() * 2, table).sum()
    in_threads(store.close)
    assert _charged(store) == 0
    del loss


def test_threads_that_save_one_buffer_are_charged_for_their_own_alone(store: TierStore) -> None:
    table, together = _table(), threading.Barrier(3)
    leaves = [new_leaf() for _ in range(3)]

    def train(leaf: torch.Tensor) -> None:
        for _ in range(3):
            leaf.grad = None
            with _scope(store):
                loss = _layers(leaf * 2, table).sum()
            together.wait(60)
            assert _charged(store) == 3 * _bytes_of(_NUM_LAYERS)
            together.wait(60)
            loss.backward()
            del loss
            together.wait(60)

    in_threads(*(partial(train, leaf) for leaf in leaves))
    assert {bits(leaf.grad) for leaf in leaves} == {_expected(table)}
    assert _totals(store)[3]["alive elsewhere"] == 9 * NBYTES

"""What is named to `prefetch`: fetched in that order, on into the room of what was got, and never at others' cost."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tests.waiting import until
from tierstore import Handle, TierStore
from tierstore.ledger.explicit_prefetch import ExplicitPrefetch
from tierstore.ledger.lookahead import Lookahead
from tierstore.ledger.state import State

pytestmark = pytest.mark.usefixtures("validated")
NBYTES = 40_000
ROOM = 4
NUM = 16


def _tensor(number: int) -> torch.Tensor:
    return torch.arange(NBYTES // 4, dtype=torch.float32) + number


def _records(num: int) -> list[Any]:
    return [SimpleNamespace(key=key) for key in range(num)]


def _order(explicit_prefetch: ExplicitPrefetch[Any]) -> Iterator[int]:
    while (record := explicit_prefetch.peek()) is not None:
        yield record.key
        explicit_prefetch.advance(1)


def test_lists_come_one_after_the_other_each_record_once() -> None:
    explicit_prefetch, records = ExplicitPrefetch[Any](), _records(6)
    for first in range(4):
        for record in records[first : first + 3]:
            explicit_prefetch.name(record)
    assert list(_order(explicit_prefetch)) == [0, 1, 2, 3, 4, 5]


@pytest.fixture
def stored(make_store: MakeStore) -> tuple[TierStore, list[Handle]]:
    """A store with room for some, and many that are on disk."""
    store = make_store(staging_bytes=ROOM * NBYTES)
    handles = [store.put(_tensor(number)) for number in range(NUM)]
    store.flush()
    assert _states(handles) == {State.DISK}
    return store, handles


def _states(handles: Sequence[Handle]) -> set[State]:
    return {handle.record.state for handle in handles}


def _get(store: TierStore, handles: Sequence[Handle], number: int) -> None:
    """It is in memory, or will be though nobody asks for it."""
    until(lambda: handles[number].record.state is State.CLEAN)
    assert torch.equal(store.get(handles[number]), _tensor(number))


def test_list_longer_than_the_room_goes_on_into_that_of_what_was_got(stored: tuple[TierStore, list[Handle]]) -> None:
    store, handles = stored
    store.prefetch(handles)
    for number in range(NUM):
        _get(store, handles, number)
        assert store.stats().staging_used_bytes <= ROOM * NBYTES
    stats = store.stats()
    assert (stats.prefetch_hits, stats.prefetch_late, stats.prefetch_misses) == (NUM, 0, 0)


def test_list_keeps_nothing_alive(stored: tuple[TierStore, list[Handle]]) -> None:
    store, handles = stored
    store.prefetch(handles)
    del handles[: NUM // 2]
    for index in range(NUM // 2):
        # A store that does nothing at the moment notices dead handles in the next call.
        until(lambda index=index: handles[index].record.state is State.CLEAN, store.stats)  # type: ignore[misc]
        assert torch.equal(store.get(handles[index]), _tensor(NUM // 2 + index))
    handles.clear()
    until(lambda: store.stats().live_handles == store.stats().staging_used_bytes == store.stats().disk_bytes == 0)
    assert not inspect(store).is_fetching_explicitly


def test_pack_takes_the_room_of_a_list_that_nobody_asks_for_and_keeps_it(
    stored: tuple[TierStore, list[Handle]],
) -> None:
    store, handles = stored
    store.prefetch(handles[:ROOM])
    until(lambda: _states(handles[:ROOM]) == {State.CLEAN})
    for number in range(3 * ROOM):
        handles.append(store.put(_tensor(NUM + number)))
    store.flush()
    until(lambda: not inspect(store).num_restores)
    assert store.stats().read_bytes == ROOM * NBYTES  # nothing twice
    for number in range(NUM, NUM + 3 * ROOM):
        assert torch.equal(store.get(handles[number]), _tensor(number))


def test_nothing_is_prefetched_while_a_pack_waits(stored: tuple[TierStore, list[Handle]]) -> None:
    """It would take the room that the pack waits for."""
    store, handles = stored
    inside = inspect(store)
    with inside.lock:
        inside.books.num_packing += 1
    store.prefetch(handles[:ROOM])
    assert _states(handles[:ROOM]) == {State.DISK}
    with inside.lock:
        inside.books.num_packing -= 1
    store.prefetch(handles[:ROOM])
    until(lambda: _states(handles[:ROOM]) == {State.CLEAN})


def test_backward_goes_first_and_takes_the_room_of_what_was_named(stored: tuple[TierStore, list[Handle]]) -> None:
    store, handles = stored
    records = [handle.record for handle in handles]
    store.prefetch(handles[: NUM // 2])
    until(lambda: _states(handles[:ROOM]) == {State.CLEAN})
    ahead = Lookahead[Any](NUM * NBYTES)
    ahead.begin(records, range(NUM // 2, NUM))
    inspect(store).residency.look_ahead(ahead)
    first = records[NUM // 2 : NUM // 2 + ROOM]
    until(lambda: {record.state for record in first} == {State.CLEAN})
    assert _states(handles[: NUM // 2]) == {State.DISK}
    for index in range(NUM // 2, NUM):
        until(lambda index=index: records[index].state is State.CLEAN)  # type: ignore[misc]
        got = inspect(store).residency.handing_out.fetch(records[index], records[index].layout, ahead, None, index)
        assert torch.equal(got, _tensor(index))
    for number in range(NUM // 2):  # in the room that backward does not need any more
        _get(store, handles, number)

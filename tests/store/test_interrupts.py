"""Handlers of signals: what they raise in the midst of a change closes the store; what they call there is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.moments import MOST_MOMENTS, Moment
from tierstore import StoreBusyError, StoreClosedError, TierStore


def out_of_time() -> None:
    raise TimeoutError("the handler's own")


def test_handler_that_raises_an_error_in_the_midst_of_a_put_closes_the_store_or_changes_nothing(
    make_store: Any,
) -> None:
    """Not only Ctrl-C: whoever gives a step a time limit with SIGALRM raises some Exception."""
    store = make_store(host_bytes=0)
    num_closed = 0
    for number in range(1, MOST_MOMENTS):
        kept = store.put(torch.full((1000,), 1.0))
        moment = Moment(TierStore.put, number, out_of_time)
        try:
            with moment:
                store.put(torch.full((1000,), 2.0))
        except TimeoutError as error:
            closed = [note for note in getattr(error, "__notes__", ()) if "tierstore: " in note]
        else:
            assert not moment.has_come
            break
        try:
            assert torch.equal(store.get(kept), torch.full((1000,), 1.0))
            store.flush()
            assert not closed, "it says that it is closed"
        except StoreClosedError:
            assert "TimeoutError" in closed[0]
            num_closed += 1
            store = make_store(host_bytes=0)
    assert 20 < number < MOST_MOMENTS - 1
    assert num_closed > 5


@pytest.mark.parametrize("is_caught", [True, False], ids=["caught", "let go on"])
def test_handler_that_calls_the_store_that_it_interrupts_is_refused(make_store: Any, is_caught: bool) -> None:
    """It would wait for ever for the lock that its own thread holds."""
    refused: list[StoreBusyError] = []
    store = make_store(host_bytes=0)

    def ask() -> None:
        try:
            store.stats()
        except StoreBusyError as error:
            refused.append(error)
            if not is_caught:
                raise

    for number in range(1, MOST_MOMENTS):
        moment = Moment(TierStore.put, number, ask)
        num_refused = len(refused)
        try:
            with moment:
                handle = store.put(torch.full((1000,), 2.0))
        except StoreBusyError:
            with pytest.raises(StoreClosedError, match="StoreBusyError"):
                store.flush()
            assert not is_caught
            store = make_store(host_bytes=0)
            continue
        assert is_caught or len(refused) == num_refused
        if not moment.has_come:
            break
        assert torch.equal(store.get(handle), torch.full((1000,), 2.0))
    assert len(refused) > 5
    assert 20 < number < MOST_MOMENTS - 1

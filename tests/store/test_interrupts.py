"""Handlers of signals: what they raise in the midst of a change closes the store; what they call there is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.moments import MOST_MOMENTS, Moment
from tierstore import StoreBusyError, StoreClosedError, TierStore
from tierstore.engine import Engine
from tierstore.lifetime import watch_over
from tierstore.tracing.recordings import Recordings


def interrupt() -> None:
    raise KeyboardInterrupt


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


@pytest.mark.parametrize(
    ("function", "first"),
    [(Engine._wait_until_open, 2), (Recordings.__init__, 1), (watch_over, 1)],
    ids=["waiting", "later", "at the end"],
)
def test_store_interrupted_while_it_is_opened_ends(store_directory: Path, function: Any, first: int) -> None:
    """Its engine runs by then, and nobody has the store: what it holds would be held as long as the process."""
    for number in range(first, MOST_MOMENTS):
        interrupts: list[KeyboardInterrupt] = []
        with Moment(function, number, interrupt) as moment:
            try:
                TierStore(store_directory).close()
            except KeyboardInterrupt as error:
                interrupts.append(error)
        if function is not Engine._wait_until_open:  # there an interactive interpreter may keep the traceback
            interrupts.clear()
        for thread in threading.enumerate():
            if thread.name.startswith("tierstore"):
                thread.join(10)
                assert not thread.is_alive(), f"moment {number}: {thread.name} still runs"
        if not moment.has_come:
            break
    assert first < number < MOST_MOMENTS - 1

"""How far ahead of backward is fetched: near, where the drive was seen to be fast enough for that, else far.

NOTE [No farther than it takes] in `tierstore/ledger/lookahead.py`.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tests.waiting import until
from tierstore import TierStore, tiered_offload
from tierstore.disk import records
from tierstore.ledger.state import State

pytestmark = pytest.mark.usefixtures("no_native_threads")  # `Drive` stands in for a read in Python

ELEMENTS = 64 * 2**10
NBYTES = 4 * ELEMENTS
HOST, STAGING = 4 * NBYTES, 3 * NBYTES


class Drive:
    """Reads of records end when backward has asked for so many more tensors. Any thread."""

    def __init__(self, num_more: int, patch: pytest.MonkeyPatch) -> None:
        self._num_more = num_more
        self._num_asked = 0
        self._begun: list[int] = []  # for each read, how many had been asked for by then
        self._changed = threading.Condition()
        self._read: Any = records.read_raw
        patch.setattr(records, "read_raw", self.read)

    def read(self, *arguments: Any) -> None:
        """In place of `read_raw`."""
        with self._changed:
            begun = self._num_asked
            self._begun.append(begun)
            assert self._changed.wait_for(lambda: self._num_asked >= begun + self._num_more, 20)
        self._read(*arguments)
        with self._changed:
            self._begun.remove(begun)

    def asked(self, store: TierStore) -> None:
        """Backward has asked for a tensor. Returns when no read is under way but those that are not to end yet."""
        with self._changed:
            self._num_asked += 1
            self._changed.notify_all()
        until(lambda: inspect(store).num_restores == self._num_held())

    def _num_held(self) -> int:
        with self._changed:
            return sum(begun + self._num_more > self._num_asked for begun in self._begun)


def _is_beyond_staging(store: TierStore) -> bool:
    """Whether something that came from disk is charged to the host budget."""
    inside = inspect(store)
    with inside.lock:
        return any(
            record.window is inside.window("host") and record.state in (State.READING, State.CLEAN)
            for record in inside.records
        )


class SaveOne(torch.autograd.Function):
    """The identity; saves a tensor, and tells in backward that it has asked for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, asked: Callable[[], None]) -> torch.Tensor:
        ctx.save_for_backward(torch.full((ELEMENTS,), 3.0))
        ctx.asked = asked
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        assert bool((saved == 3).all())
        del saved
        ctx.asked()
        return gradient, None


def _step(store: TierStore, drive: Drive, num: int, **options: Any) -> list[bool]:
    """For each of so many nodes of backward, whether anything from disk lay beyond staging then."""
    seen: list[bool] = []

    def asked() -> None:
        drive.asked(store)
        seen.append(_is_beyond_staging(store))

    x = torch.ones(1, requires_grad=True)
    with tiered_offload(store, min_bytes=NBYTES, **options):
        y = x
        for _ in range(num):
            y = SaveOne.apply(y, asked)
    store.flush()
    y.backward()
    return seen


def test_known_graph_on_a_fast_drive_is_fetched_near(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store, fast = make_store(host_bytes=HOST, staging_bytes=STAGING, codec="none"), Drive(0, monkeypatch)
    assert any(_step(store, fast, 16))
    for _ in range(3):
        assert not any(_step(store, fast, 16))
    stats = store.stats()
    assert stats.prefetch_hits > 30
    assert (stats.prefetch_late, stats.prefetch_misses) == (0, 0)
    for options in ({"lookahead_bytes": HOST + STAGING}, {"prefetch": "reverse"}):
        for _ in range(2):
            assert any(_step(store, fast, 16, **options)), "that is given, or not learned"


def test_drive_that_takes_longer_than_staging_lasts_always_far(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read ends when backward has asked for five tensors more, of which staging holds three."""
    store, slow = (
        make_store(host_bytes=2 * HOST, staging_bytes=STAGING, codec="none", io_depth=16),
        Drive(5, monkeypatch),
    )
    for _ in range(3):
        assert any(_step(store, slow, 20))
    assert (store.stats().prefetch_late, store.stats().prefetch_misses) == (0, 0)

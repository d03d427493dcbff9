"""Ctrl-C while a scope is entered or left, at each moment: its hooks do not stay on the thread."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

from tierstore import StoreClosedError, TierStore, tiered_offload

MOST_MOMENTS = 1000
SWALLOWING = ("__del__", "remove")  # the latter: of weakref.WeakValueDictionary


class Interrupt:
    """Raises KeyboardInterrupt at a moment, by its number, of what `function` and all that it calls run.

    The moments are those at which CPython looks for signals: when a Python function begins, and when one of C returns;
    but not in a finalizer or a weak reference's callback, where it swallows whatever is raised.
    """

    def __init__(self, function: Any, number: int) -> None:
        self._code = function.__code__
        self._left = number
        self.has_come = False

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and not self.has_come and self._is_inside(frame):
            self._left -= 1
            if self._left == 0:
                self.has_come = True
                raise KeyboardInterrupt

    def _is_inside(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code is not self._code:
            frame = None if frame.f_code.co_name in SWALLOWING else frame.f_back
        return frame is not None


def interrupted_step(store: TierStore, function: Any, number: int) -> Interrupt:
    weight = torch.ones(1000, requires_grad=True)
    with Interrupt(function, number) as interrupt:
        try:
            with tiered_offload(store, min_bytes=0):
                (weight * weight).exp()
        except KeyboardInterrupt:
            pass
    return interrupt


@pytest.mark.parametrize(
    ("function", "first"),
    # When leaving begins nothing of ours has run yet: no Python code can do anything about that moment.
    [(tiered_offload.__enter__, 1), (tiered_offload.__exit__, 2)],
    ids=["entered", "left"],
)
def test_scope_interrupted_at_any_moment_leaves_no_hooks(make_store: Any, function: Any, first: int) -> None:
    store = make_store(host_bytes=0)
    for number in range(first, MOST_MOMENTS):
        interrupt = interrupted_step(store, function, number)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, f"moment {number}"
        if not interrupt.has_come:
            break
        try:
            store.flush()
        except StoreClosedError:
            store = make_store(host_bytes=0)
    assert first + 5 < number < MOST_MOMENTS - 1


def test_interrupt_that_closes_the_store_says_so(make_store: Any) -> None:
    """At some moment of leaving a scope the books are half changed."""
    for number in range(2, MOST_MOMENTS):
        store = make_store(host_bytes=0)
        weight = torch.ones(1000, requires_grad=True)
        interrupt, scope = Interrupt(tiered_offload.__exit__, number), tiered_offload(store, min_bytes=0)
        with pytest.raises(KeyboardInterrupt) as caught, interrupt, scope:
            (weight * weight).exp()
        if notes := getattr(caught.value, "__notes__", None):
            assert len(notes) == 1
            assert "came in the midst of a change of its books, which closed it; open another" in notes[0]
            with pytest.raises(StoreClosedError, match="open another"):
                store.flush()
            return
        store.flush()
    raise AssertionError("no moment closes the store")

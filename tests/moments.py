"""Something that comes between two lines of the store, as a signal's handler does."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType

__all__ = ["Moment", "ctrl_c", "interrupt", "moments", "out_of_time"]

_MOST_MOMENTS = 2000
_SWALLOWING = ("__del__", "remove")  # the latter: of weakref.WeakValueDictionary


class Moment:
    """Calls `handle` at a moment, by its number, of what `function` and all that it calls run.

    The moments are those at which CPython looks for signals: when a Python function begins, and when one of C returns;
    but not in a finalizer or a weak reference's callback, where it swallows whatever is raised. Nor in what others have
    called at collections of garbage (Hypothesis does): there are none meanwhile.

    Attributes:
        has_come: it was called.
    """

    def __init__(self, function: FunctionType, number: int, handle: Callable[[], object]) -> None:
        self._code = function.__code__
        self.number = self._left = number
        self._handle = handle
        self.has_come = False
        self._collects = gc.isenabled()

    def __enter__(self) -> Moment:
        gc.disable()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        if self._collects:
            gc.enable()

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and not self.has_come and self._is_inside(frame):
            self._left -= 1
            if self._left == 0:
                self.has_come = True
                self._handle()

    def _is_inside(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code is not self._code:
            frame = None if frame.f_code.co_name in _SWALLOWING else frame.f_back
        return frame is not None


def moments(
    function: FunctionType, handle: Callable[[], object], *, first: int = 1, stride: int = 1, least: int = 20
) -> Iterator[Moment]:
    """Each `stride`th of them, until one has not come: that is the last. AssertionError: it is not beyond `least`."""
    for number in range(first, _MOST_MOMENTS, stride):
        moment = Moment(function, number, handle)
        yield moment
        if not moment.has_come:
            break
    assert least < number < _MOST_MOMENTS - stride, f"{number} moments"


def interrupt() -> None:
    """What Python does at Ctrl-C."""
    raise KeyboardInterrupt


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def out_of_time() -> None:
    """What a handler does that gives a step a time limit."""
    raise TimeoutError("the handler's own")

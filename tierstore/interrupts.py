"""What comes between two lines of ours: Ctrl-C, and whatever a handler of a signal raises or calls.

CPython runs such a handler on the main thread, between any two instructions, in the midst of a change of the store's
books too (signal, "Execution of Python signal handlers"). What it raises goes through us like an error of our own.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from .errors import StoreBusyError, TierStoreError

__all__ = ["ENDINGS", "ended_by_signals", "is_half_changed", "is_interrupt"]

ENDINGS = (signal.SIGTERM, signal.SIGHUP)
"""A service manager's, and a terminal's that goes away."""

_NO_HANDLERS = sys.stdlib_module_names | {"numpy", "tierstore", "torch"}
"""Packages whose functions run inside of ours because we call them."""
_TELLING = ("_raise_cause", "_raise_spill_error")
"""Of `Residency`. What they raise came up on another thread: that one's frames follow in the traceback."""


def is_interrupt(error: BaseException) -> bool:
    """Whether this came between two lines of ours, so that what they were about may be half done.

    No program's own function is called under the store's lock; modes of torch are shut out (`unseen_by_modes` in
    `layout.py`), and what a finalizer raises goes no further. So one that stands in the traceback is a handler's. Nor
    is an error of another kind than the system, torch and we have to tell something that one of our lines has raised:
    another thread has (PyThreadState_SetAsyncExc), or there was no stack left for a call, or no memory. Our own errors
    are none, which may be told again, with the traceback of the last time.
    """
    if isinstance(error, TierStoreError):
        return isinstance(error, StoreBusyError)
    if not isinstance(error, Exception):
        return True
    is_known = _is_of_system(error) and _package_of(type(error).__module__) in _NO_HANDLERS
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name in _TELLING:
            return False
        if _package_of(traceback.tb_frame.f_globals.get("__name__")) not in _NO_HANDLERS:
            return True
        traceback = traceback.tb_next
    return not is_known


_CHANGING = "is_changing"
"""The name of a local variable. A method that changes the books sets it before the first step and takes it back after
the last one. It costs nothing, belongs to this call alone, and keeps its value when something is raised."""


def is_half_changed(traceback: TracebackType | None, module: str) -> bool:
    """Whether what has come up this way, by an interrupt, may have left a change half done.

    `module`: whose methods begin the changes. The first of them in the traceback has to have the mark; a function
    without it that is called where nothing is being changed changes nothing.
    """
    has_begun = False
    while traceback is not None:
        frame = traceback.tb_frame
        is_marked = _CHANGING in frame.f_code.co_varnames
        if is_marked and frame.f_locals.get(_CHANGING, False):
            return True
        if not has_begun and frame.f_globals.get("__name__") == module and frame.f_code.co_name != "call":
            has_begun = True
            if not is_marked:
                return True
        traceback = traceback.tb_next
    return False


def _is_of_system(error: Exception) -> bool:
    """Whether it may be a call's that has failed: of the system, or of torch, whose errors are all RuntimeErrors."""
    if isinstance(error, OSError):
        return error.errno is not None  # a time limit's TimeoutError has none
    return isinstance(error, RuntimeError) and not isinstance(error, RecursionError)


def _package_of(module: object) -> str:
    return str(module).partition(".")[0]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM does what Ctrl-C does, so that what a command has begun is put away; SIGHUP too, unless it is
    ignored (nohup). Main thread only."""
    numbers = [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

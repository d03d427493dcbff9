"""Tells an interrupt between two of our own lines (Ctrl-C, any other exception of a signal handler, which CPython may
run between any two instructions on the main thread) from an error of our own, and whether it left a change of the
store's books half done."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import StoreBusyError, TierStoreError

ENDINGS = (signal.SIGTERM, signal.SIGHUP)
"""The signals of a service manager that stops a process, and of a terminal that closes."""

_NO_HANDLERS = sys.stdlib_module_names | {"numpy", "tierstore", "torch"}
"""Packages whose functions we call ourselves, so their frames in a traceback prove nothing."""


def is_interrupt(error: BaseException) -> bool:
    """Whether the error was raised between two of our lines, so that their change may be half done.

    - KeyboardInterrupt and all else that is no `Exception`: yes. `StoreBusyError`: yes. Our other errors: no; they may
      be raised again, with the traceback of the last time.
    - An error with a function of the program in its traceback: yes. A handler called it: we call none under the store's
      lock, `unseen_by_modes` (`layout.py`) shuts out torch's modes, and Python drops what a finalizer raises.
    - An error of a kind that neither the system nor torch raises in our calls: yes. Another thread has set it
      (PyThreadState_SetAsyncExc), or the stack or memory was exhausted.
    """
    if isinstance(error, TierStoreError):
        return isinstance(error, StoreBusyError)
    if not isinstance(error, Exception):
        return True
    is_known = _is_of_system(error) and _package_of(type(error).__module__) in _NO_HANDLERS
    traceback = error.__traceback__
    while traceback is not None:
        if _package_of(traceback.tb_frame.f_globals.get("__name__")) not in _NO_HANDLERS:
            return True
        traceback = traceback.tb_next
    return not is_known


def _is_of_system(error: Exception) -> bool:
    """Whether a failed call of the system or of torch may have raised it. All errors of torch are RuntimeErrors."""
    if isinstance(error, OSError):
        return error.errno is not None  # a time limit's TimeoutError has none
    return isinstance(error, RuntimeError) and not isinstance(error, RecursionError)


def _package_of(module: object) -> str:
    return str(module).partition(".")[0]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside the context, SIGTERM acts like Ctrl-C, so that a command can clean up what it has begun. SIGHUP does too,
    unless it is ignored (nohup). Main thread only."""
    numbers = [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_held_back() -> Iterator[Callable[[], None]]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP until the yielded function is called, or until the end. Main thread only."""
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDINGS)}

    def let_through() -> None:
        while handlers:
            signal.signal(*handlers.popitem())
        while came:
            signal.raise_signal(came.pop())

    try:
        for number in tuple(handlers):
            signal.signal(number, lambda number, _: came.append(number))
        yield let_through
    finally:
        let_through()

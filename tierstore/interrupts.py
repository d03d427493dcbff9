"""What comes between two lines of ours: Ctrl-C, and whatever a handler of a signal raises or calls.

CPython runs such a handler on the main thread, between any two instructions, in the midst of a change of the store's
books too (signal, "Execution of Python signal handlers"). What it raises goes through us like an error of our own.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import StoreBusyError, TierStoreError

__all__ = ["ended_by_sigterm", "is_interrupt"]

_NO_HANDLERS = sys.stdlib_module_names | {"numpy", "tierstore", "torch"}
"""Packages whose functions run inside of ours because we call them."""
_TELLING = ("_raise_cause", "_raise_spill_error")
"""Of `Residency`. What they raise came up on another thread: that one's frames follow in the traceback."""


def is_interrupt(error: BaseException) -> bool:
    """Whether this came between two lines of ours, so that what they were about may be half done.

    No program's own function is called under the store's lock. So one that stands in the traceback is a handler's. Our
    own errors are none, which may be told again, with the traceback of the last time.
    """
    if isinstance(error, TierStoreError):
        return isinstance(error, StoreBusyError)
    if not isinstance(error, Exception):
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_name not in _TELLING:
        package = str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _NO_HANDLERS:
            return True
        traceback = traceback.tb_next
    return False


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM does what Ctrl-C does, so that what a command has begun is put away. Main thread only."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)

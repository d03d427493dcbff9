"""What happens to open stores when the process forks or the interpreter exits.

The module's only state is the set of open stores: both hooks need it, and neither can get it as an argument."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import deque
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING

from ..base.remains import Remains
from ..tensors.torch_names import engine_run_backward

if TYPE_CHECKING:
    from .core import Core

_EXIT_DEADLINE_SECONDS = 10.0
_BACKWARD_SECONDS = 1.0
"""How long exit waits for threads in backward. Those that need a store have just been told that it is closed."""

_BACKWARD = engine_run_backward.__code__


_open: set[Remains[Core]] = set()
_dead: deque[Remains[Core]] = deque()


def watch_over(core: Core) -> None:
    """Have a store, as long as it lives, ended when the process ends, and made inert in forked children."""
    _open.add(Remains(core, _dead.append))
    try:
        while True:
            _open.discard(_dead.popleft())
    except IndexError:
        pass  # no more


def _living() -> list[Core]:
    return [core for remains in list(_open) if (core := remains()) is not None]


def _at_exit() -> None:
    # A thread that still runs torch operations while the interpreter finalizes aborts the process: when it asks for the
    # interpreter's lock, it is ended, and the C++ frames below cannot be unwound.
    living = _living()
    for core in living:
        core.end_at_exit(_EXIT_DEADLINE_SECONDS)
    ends_at = time.monotonic() + _BACKWARD_SECONDS
    while living and any(map(_is_in_backward, sys._current_frames().values())) and time.monotonic() < ends_at:
        time.sleep(0.001)  # no event tells when a thread leaves backward


def _is_in_backward(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _BACKWARD:
        frame = frame.f_back
    return frame is not None


def _in_child() -> None:
    with ExitStack() as every_one:  # calls all of them, even if one raises
        for core in _living():
            every_one.callback(core.end_in_child)


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)

"""What happens to open stores when the process forks or the interpreter exits.

The only state of the module is the set of stores that are open, which both hooks need and neither of them is given.
"""

from __future__ import annotations

import atexit
import os
import weakref
from contextlib import ExitStack
from typing import Protocol

__all__ = ["Mortal", "watch_over"]

_EXIT_DEADLINE_SECONDS = 10.0


class Mortal(Protocol):
    """Something with threads and descriptors."""

    def end_at_exit(self, deadline_seconds: float) -> None:
        """Stop, wake whoever waits, and join the threads; drain nothing."""

    def end_in_child(self) -> None:
        """In a forked child: close the child's copies of descriptors, refuse all use. The parent's are untouched."""


_open: weakref.WeakSet[Mortal] = weakref.WeakSet()


def watch_over(mortal: Mortal) -> None:
    """Have it ended with the process, and made inert in forked children, for as long as it lives."""
    _open.add(mortal)


def _at_exit() -> None:
    # Threads of ours that still run torch operations while the interpreter finalizes abort the process.
    for mortal in list(_open):
        mortal.end_at_exit(_EXIT_DEADLINE_SECONDS)


def _in_child() -> None:
    with ExitStack() as every_one:  # whatever one of them raises
        for mortal in list(_open):
            every_one.callback(mortal.end_in_child)


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)

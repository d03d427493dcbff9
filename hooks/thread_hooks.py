"""The saved-tensor hooks of a thread: PyTorch keeps a stack of pairs (pack, unpack), and the innermost is in force.

Ctrl-C may come between any two instructions of Python. So a pair moves between the thread and a list in one call of C:
an interrupt comes before it or after it, and no pair is ever in neither place."""

from __future__ import annotations

import functools
import operator
from collections import deque
from itertools import repeat, starmap
from typing import Any

from tierstore.tensors.torch_names import pop_hooks, push_hooks, top_hooks
from tierstore.tensors.uncompiled import uncompiled

RemovedHooks = list[tuple[Any, Any]]
"""Hooks that were taken off a thread, the innermost first."""

_TAKE_TOP_HOOKS: tuple[Any, ...] = functools.partial(top_hooks, False), pop_hooks


@uncompiled
def take_off_all(removed: RemovedHooks) -> None:
    """Take every pair of hooks off this thread, and append it to `removed`."""
    while top_hooks(False) is not None:
        removed.extend(filter(None, map(operator.call, _TAKE_TOP_HOOKS)))


@uncompiled
def put_back(removed: RemovedHooks) -> None:
    """Put the hooks that are in `removed` on this thread again, the innermost last; `removed` is empty afterwards."""
    deque(starmap(push_hooks, map(list.pop, repeat(removed, len(removed)))), maxlen=0)


def owner_of_hooks() -> object:
    """The object whose method is the innermost pack hook on this thread; None: no hook is set, or it is a function."""
    hooks: tuple[Any, Any] | None = top_hooks(False)
    return getattr(hooks[0], "__self__", None) if hooks else None

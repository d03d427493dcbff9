"""The saved-tensor hooks of a thread: whose are in force, how they come off and go on again."""

from __future__ import annotations

import functools
import operator
from collections import deque
from itertools import repeat, starmap
from typing import Any

import torch

from tierstore.torch_names import pop_hooks, push_hooks, top_hooks
from tierstore.uncompiled import traceable, uncompiled

from .below import HeldTensor
from .recorded import RecordedScope
from .saved import SavedTensor
from .scope import OffloadScope
from .select import Kept

__all__ = ["RemovedHooks", "enclosing_scope", "owner_of_hooks", "put_back", "take_off_all", "unpack"]

RemovedHooks = list[tuple[Any, Any]]
"""Hooks that were taken off a thread, the innermost first."""

# Here and in `put_back`, hooks move between thread and list in one call of C: an interrupt comes before or after.
_TAKE_TOP_HOOKS: tuple[Any, ...] = functools.partial(top_hooks, False), pop_hooks


@traceable
def unpack(packed: SavedTensor | Kept | HeldTensor) -> torch.Tensor:
    """What autograd gets back; the unpack hook of every scope."""
    if torch.compiler.is_dynamo_compiling():
        return packed.traced()
    return packed.unpack()


@uncompiled
def take_off_all(removed: RemovedHooks) -> None:
    """Take all hooks off this thread, into `removed`."""
    while top_hooks(False) is not None:
        removed.extend(filter(None, map(operator.call, _TAKE_TOP_HOOKS)))


@uncompiled
def put_back(removed: RemovedHooks) -> None:
    """Push what `removed` has left, and empty it."""
    deque(starmap(push_hooks, map(list.pop, repeat(removed, len(removed)))), maxlen=0)


def enclosing_scope() -> OffloadScope | None:
    """The scope of ours whose hooks are in force on this thread, if any."""
    scope = owner_of_hooks()
    if isinstance(scope, RecordedScope):
        scope = scope.scope
    return scope if isinstance(scope, OffloadScope) else None


def owner_of_hooks() -> object:
    """Of the hooks that are in force on this thread; None where there are none, or plain functions."""
    hooks: tuple[Any, Any] | None = top_hooks(False)
    return getattr(hooks[0], "__self__", None) if hooks else None

"""How a store learns that an object has died, and what it has to do then.

NOTE [No finalizers]
A handle, a log of saved tensors, or a store may die on any thread at any point: in a garbage collection inside one of
our critical sections, or at interpreter exit. So its death may neither take a lock nor wait. Nor may it run a line of
Python: a Ctrl-C that came during a long call of C++ (backward) is handled at the next line of Python. If that is in a
finalizer, Python swallows the exception that the signal's handler raises, and skips the rest of the finalizer.

Hence these objects have no finalizer. Each has a second object that outlives it, its `Remains`, which holds the data
for the work after its death. The remains are a weak reference to the object, whose callback is the `append` of a queue.
So a death only makes calls of C, and the next call of the store does the rest. When the store itself dies, no call will
follow: its remains go into the queue of the engine's loop, which this wakes (`Engine`).

CPython does not call the callback of a weak reference that is part of the same garbage as its object. So the store
keeps the remains of all objects that it has to account for, until it has done so."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Remains(weakref.ref[T]):
    """A weak reference that goes into a queue when its object dies, with the data for the work that follows. It is
    compared by identity. `note_death` is called with the remains; it must be a function of C, like `deque.append`: see
    NOTE [No finalizers]."""

    __slots__ = ()

    def __new__(cls, living: T, note_death: Callable[[Self], None], *arguments: Any) -> Self:
        return super().__new__(cls, living, note_death)

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__

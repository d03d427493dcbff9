"""What is left of an object when it is gone, and how its store learns of that.

NOTE [No finalizers]
A handle, a log of saved tensors, or a store may die on any thread, in the midst of anything: in a garbage collection
inside one of our critical sections, or at interpreter exit. So nothing may take a lock then, or wait. Nor may a line of
Python run: Ctrl-C that came during a long call of C++ (backward) is handled at the next one, and what its handler
raises in a finalizer is swallowed, with the rest of the finalizer.

Hence none of them has a finalizer. What is still to be done when an object has died is known to another one, which
outlives it, its `Remains`. That is itself a weak reference to the object, and its callback is the `append` of a queue:
all that happens at a death are calls of C, and whoever calls the store next does the rest. When it is the store that
has died, nobody will: then the queue is that of the engine's loop, which is woken (`Engine`).

CPython does not call a weak reference that is part of the same garbage as what it refers to. So the store holds on to
the remains of all that it has to account for, until it has done so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self, TypeVar

__all__ = ["Remains"]

T = TypeVar("T")


class Remains(weakref.ref[T]):
    """A weak reference that is put into a queue when what it refers to dies; it knows what is to be done then.

    Called, it gives what it refers to, None once that is gone. Unlike other weak references it is compared by identity.

    Args:
        living: what it refers to.
        note_death: called with the remains, see NOTE [No finalizers]: of C alone, as the `append` of a deque is.
        arguments: of the subclass's constructor.
    """

    __slots__ = ()

    def __new__(cls, living: T, note_death: Callable[[Self], None], *arguments: Any) -> Self:
        """The first two are the weak reference's."""
        return super().__new__(cls, living, note_death)

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__

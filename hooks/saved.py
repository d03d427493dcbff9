"""What the graph holds in the place of a saved tensor that was handed to a store.

NOTE [The same object]
What backward gets should not depend on the hooks, down to the class of a tensor and the attributes that somebody set on
it: a function may compute with them. Hooks that do nothing, `lambda tensor: tensor`, set the measure. Autograd treats
what they return in two ways (`SavedVariable::unpack` of torch/csrc/autograd/saved_variable.cpp, torch 2.11 and 2.13):

* Where the saved tensor requires no gradient, the function gets the very object. So that is handed out for as long as
  somebody else keeps it alive. It is not what the store holds: who holds an object cannot be told from the owners of
  its storage. Once it has died, its bytes come back, but what was set on it would not. So a tensor of a subclass, and
  one that has attributes when it is packed, is kept where it is, itself (`Kept` in `select.py`).
* Where it requires gradients, the function gets a new tensor over the same memory, of no subclass and without
  attributes (unless a `__torch_dispatch__` makes them). So it matters not which of its aliases is handed out.
"""

from __future__ import annotations

import weakref

import torch

from tierstore.errors import ModifiedInPlaceError
from tierstore.layout import Layout, alias_of, describe, is_same_view, outside_of_modes
from tierstore.noted import NotedTensor
from tierstore.uncompiled import uncompiled

from .order import PackLog
from .traced import check_unchanged, traced_saved

__all__ = ["RejoinedTensor", "SavedTensor"]

_EMPTY = torch.empty(0, device="cpu")


class SavedTensor(NotedTensor):
    """An alias of the tensor, guarded, while it is only noted; then a reference to its bytes, and its geometry.

    Attributes:
        itself: the saved tensor, for as long as that lives; None: a view that requires gradients.
    """

    __slots__ = ("itself",)

    log: PackLog
    itself: weakref.ref[torch.Tensor] | None

    @uncompiled
    def unpack(self) -> torch.Tensor:
        """The saved tensor; waits only if it is not in memory yet. See `TierStore.get` for what it raises."""
        alias, log = self.alias, self.log
        if alias is None or log.books.closed is not None:
            self._book()
            alias = log.fetch(self.index, self.layout)
        else:
            check_unchanged(alias, self.version)
            log.asked_for(self.index)
        itself = None if self.itself is None else self.itself()  # NOTE [Stolen gradients] in tierstore/residency.py
        if itself is None or (itself.requires_grad and not is_same_view(itself, alias)):
            return alias
        return itself

    def traced(self) -> torch.Tensor:
        """Under a trace of the graph: what `unpack` gives, each time that the traced graph runs."""
        self._book()
        layout = self.layout
        if self.handle is None or layout.conj or layout.neg:
            return self.unpack()
        return traced_saved(self.log.number, self.index, self.handle.record.device, *layout[:4])

    def _book(self) -> None:
        if self.handle is None:
            self.log.books.book(self)


class RejoinedTensor(SavedTensor):
    """A tensor over restored bytes that was saved again, and shares the record that they were restored from.

    It may have a version counter of its own (from `.data`, or `unsafe_chunk`), of which the record's tells nothing. So
    that is kept too, without the memory.
    """

    __slots__ = ("_guard",)

    _guard: torch.Tensor

    def guard(self, tensor: torch.Tensor, layout: Layout) -> None:
        """Keep the version counter of the tensor, whose geometry that is."""
        with outside_of_modes():
            self._guard = alias_of(tensor, layout)
            self._guard.data = _EMPTY

    @uncompiled
    def unpack(self) -> torch.Tensor:
        """See `SavedTensor.unpack`."""
        version = self._guard._version
        if version != self.version:
            raise ModifiedInPlaceError(describe(self.layout), self.version, version)
        return super().unpack()

    def traced(self) -> torch.Tensor:
        """What `unpack` gives, outside of the traced graph, whose operator knows of the record's counter alone."""
        return self.unpack()

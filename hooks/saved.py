"""What the graph holds in the place of a saved tensor that was handed to a store."""

from __future__ import annotations

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
    """The tensor itself, guarded, while it is only noted; then a reference to its bytes, and its geometry."""

    __slots__ = ()

    log: PackLog

    @uncompiled
    def unpack(self) -> torch.Tensor:
        """The saved tensor; waits only if it is not in memory yet. See `TierStore.get` for what it raises."""
        alias, log = self.alias, self.log
        if alias is None or log.books.closed is not None:
            self._book()
            return log.fetch(self.index, self.layout)
        check_unchanged(alias, self.version)
        log.asked_for(self.index)
        root = self.root()  # NOTE [Stolen gradients] in tierstore/residency.py
        return root if root is not None and is_same_view(root, alias) else alias

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

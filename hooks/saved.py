"""What the graph holds in the place of a saved tensor that was handed to a store."""

from __future__ import annotations

import torch

from tierstore.layout import is_same_view
from tierstore.noted import NotedTensor
from tierstore.uncompiled import uncompiled

from .order import PackLog
from .traced import check_unchanged, traced_saved

__all__ = ["SavedTensor"]


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

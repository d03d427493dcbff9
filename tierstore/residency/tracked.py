"""A saved tensor that may have no record yet: see NOTE [Tracked, then registered] in `ledger/tracked.py`."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..ledger.log import GraphLog
from ..tensors.layout import Layout, layout_of
from .handle import Handle, Record

NOT_ENTERED = -1
"""Instead of an index."""


class TrackedTensor:
    """A saved tensor, with everything that is needed to register it later. Who makes one sets each attribute.

    Attributes:
        alias: a detached alias of the tensor; None once it is registered, or the store is closed.
        root: weak reference to the tensor, or to its base.
        address: where the storage lay at packing.
        storage_id: identifies the storage while the alias exists.
        key: the key that its record will have; it gets it with the index.
        itself: the saved tensor, for as long as it lives, if backward is to get that very object.
        index: its place in the log; NOT_ENTERED: it has none yet, see NOTE [Grants] in `ledger/grants.py`.
        joined: it was counted as a view of a storage that another tensor has brought in.
        device: the accelerator that the tensor lives on; None: host memory. `stream`: its stream that packed it.
        handle, layout: set when it is registered; until then `handle` is None. Where the log keeps layouts, that is set
            before.
    """

    __slots__ = (
        "__weakref__", "address", "alias", "device", "handle", "index", "itself", "joined", "key", "layout", "log",
        "root", "storage_id", "stream", "version",
    )  # fmt: skip

    alias: torch.Tensor | None
    version: int
    root: weakref.ref[torch.Tensor]
    address: int
    storage_id: int
    log: TrackedLog
    itself: weakref.ref[torch.Tensor] | None
    index: int
    key: int
    joined: bool
    device: torch.device | None
    stream: Any
    handle: Handle | None
    layout: Layout

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a tierstore saved tensor belongs to its graph and cannot be pickled")

    def close(self) -> None:
        """The store is closed: there are no bytes any more. A trace may still look at the layout."""
        if self.alias is not None:
            self.layout = layout_of(self.alias)
        self.alias = None


TrackedLog = GraphLog[TrackedTensor, Record]
"""The log of a real graph: a `PackLog` (`hooks/order.py`)."""

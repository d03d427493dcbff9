"""A saved tensor that may have no record yet: see NOTE [Tracked, then registered] in `ledger/tracked.py`."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..ledger.log import GraphLog
from .handle import Handle, Record
from .layout import Layout, layout_of


class TrackedTensor:
    """A saved tensor, with everything that is needed to register it later.

    Attributes:
        alias: a detached alias of the tensor; None once it is registered, or the store is closed.
        root: weak reference to the tensor, or to its base.
        address: where the storage lay at packing.
        storage_id: identifies the storage while the alias exists.
        key: the key that its record will have.
        itself: the saved tensor, for as long as it lives, if backward is to get that very object.
        joined: it was counted as a view of a storage that another tensor has brought in.
        device: the accelerator that the tensor lives on; None: host memory. `stream`: its stream that packed it.
        handle, layout: set when it is registered; until then `handle` is None. Where the log keeps layouts, that is set
            before.
    """

    __slots__ = (
        "__weakref__", "address", "alias", "device", "handle", "index", "itself", "joined", "key", "layout", "log",
        "root", "storage_id", "stream", "version",
    )  # fmt: skip

    layout: Layout
    index: int

    def __init__(
        self,
        alias: torch.Tensor | None,
        version: int,
        root: weakref.ref[torch.Tensor],
        address: int,
        storage_id: int,
        key: int,
        log: TrackedLog,
        itself: weakref.ref[torch.Tensor] | None = None,
    ) -> None:
        self.alias = alias
        self.version = version
        self.root = root
        self.address = address
        self.storage_id = storage_id
        self.key = key
        self.log = log
        self.itself = itself
        self.joined = False
        self.device: torch.device | None = None
        self.stream: Any = None
        self.handle: Handle | None = None

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a tierstore saved tensor belongs to its graph and cannot be pickled")

    def close(self) -> None:
        """The store is closed: there are no bytes any more. A trace may still look at the layout."""
        if self.alias is not None:
            self.layout = layout_of(self.alias)
        self.alias = None


TrackedLog = GraphLog[TrackedTensor, Record]
"""The log of a real graph: a `PackLog` (`hooks/order.py`)."""

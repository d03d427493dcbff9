"""Tensors that were handed out and are still in use after their record's bytes have left memory.

A record keeps the tensors that it hands out while its bytes are in memory: see NOTE [Stolen gradients] in
`handing_out.py`. When the bytes leave memory, the tensors that nobody else refers to are dropped. The handle keeps the
others until nobody else refers to them either; calls of the store check this. Keeping them takes no memory, because
the other users keep the bytes alive anyway. When the handle dies, they go with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from sys import getrefcount

import torch

from ..tensors.torch_names import tensor_use_count
from .handle import Record

_NUM_SCANNED_PER_CALL = 16


_unused = (torch.empty(0),)
(_REFERENCES_UNUSED,) = zip(map(getrefcount, _unused), map(tensor_use_count, _unused), strict=True)


def in_use(tensors: Collection[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors to which anybody besides this collection refers, in Python or in C++.

    Autograd passes tensors on, so a reference of one kind may become one of the other kind a moment later. Hence the
    references to the Python object and those from C++ to the tensor itself are counted in one call of C, during which
    no other thread that holds Python objects runs."""
    references = list(zip(map(getrefcount, tensors), map(tensor_use_count, tensors), strict=True))
    if references.count(_REFERENCES_UNUSED) == len(references):
        return ()
    return tuple(tensor for tensor, found in zip(tensors, references, strict=True) if found != _REFERENCES_UNUSED)


class OutstandingViews:
    """Makes handles keep their outstanding tensors. Guarded by the store's lock."""

    def __init__(self) -> None:
        self.holders: deque[Record] = deque()

    def drop_unused(self, record: Record) -> None:
        """Drop the tensors that a record has handed out, except those in use; its bytes leave memory."""
        if record.views:
            self.keep(record, record.views.values())
            record.drop_views()

    def keep(self, record: Record, handed_out: Collection[torch.Tensor]) -> None:
        used = in_use(handed_out)
        if used:
            if not record.outstanding:
                self.holders.append(record)
            record.keep_outstanding(record.outstanding + used)

    def take_back(self, how_many: int | None = _NUM_SCANNED_PER_CALL) -> None:
        """Drop the outstanding tensors of up to `how_many` records (None: all) that are not in use any more."""
        num_holders = len(self.holders)
        for _ in range(num_holders if how_many is None else min(how_many, num_holders)):
            record = self.holders.popleft()
            record.keep_outstanding(in_use(record.outstanding))
            if record.outstanding:
                self.holders.append(record)

    def drop_all(self) -> None:
        for record in self.holders:
            record.keep_outstanding(())
        self.holders.clear()

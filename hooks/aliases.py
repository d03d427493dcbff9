"""Views of one storage are stored once, where that is safe.

A storage can be written through several version counters (the parts of `unsafe_chunk`, `.data`, a numpy workspace):
that two saved tensors share a storage and show the same version does not mean that the same bytes were saved. So a
saved tensor joins an earlier record only if both are views of the same living tensor, which means one counter, at
the same version, and none of the record's bytes has been read yet.

What was restored is saved again by double backward and by reentrant checkpointing. Autograd gives it to its functions
as new tensors, of which nothing tells that they share a counter with the record's; it joins only where the bytes in
memory are confirmed, by checksum, to be those on disk, and its own counter is kept beside the record's.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from tierstore.handle import Handle
from tierstore.layout import Layout
from tierstore.ownership import records_over
from tierstore.residency import Residency

__all__ = ["Joined", "join_record"]


class Joined(NamedTuple):
    """Where a tensor's bytes are, in a record that there is already.

    Attributes:
        handle: of the record.
        layout: of the tensor, over what the record is of.
        is_restored: the tensor lies over restored bytes; its version counter need not be the record's.
    """

    handle: Handle
    layout: Layout
    is_restored: bool


def join_record(
    books: Residency, tensor: torch.Tensor, root: weakref.ref[torch.Tensor], layout: Layout
) -> Joined | None:
    """The record that holds the tensor's bytes too; None: it needs one of its own.

    Args:
        root: of the tensor's base, or itself.
    """
    for record, handle in records_over(tensor.untyped_storage(), tensor._version, books):
        if record.span is not None:
            restored = books.rejoin(record, tensor, layout)
            if restored is not None:
                return Joined(handle, restored, is_restored=True)
        elif record.root is root and books.join(record, layout, tensor.nbytes):
            return Joined(handle, layout, is_restored=False)
    return None

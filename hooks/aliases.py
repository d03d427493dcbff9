"""Views of one storage are stored once, where that is safe.

A storage can be written through several version counters (the parts of `unsafe_chunk`, `.data`, a numpy workspace):
that two saved tensors share a storage and show the same version does not mean that the same bytes were saved. So a
saved tensor joins an earlier record only if both are views of the same living tensor, which means one counter, at
the same version, and none of the record's bytes has been read yet.

What was restored is saved again by double backward and by reentrant checkpointing. Autograd gives it to its functions
as new tensors, of which nothing tells that they share a counter with the record's; it joins only where the bytes in
memory are confirmed, by checksum, to be those on disk.
"""

from __future__ import annotations

import weakref

import torch

from tierstore.handle import Handle
from tierstore.layout import Layout
from tierstore.ownership import records_over
from tierstore.residency import Residency

__all__ = ["join_record"]


def join_record(
    books: Residency, tensor: torch.Tensor, root: weakref.ref[torch.Tensor], layout: Layout
) -> tuple[Handle, Layout] | None:
    """The handle of a record that holds the tensor's bytes too, and its layout there; None: it needs one of its own.

    Args:
        root: of the tensor's base, or itself.
    """
    for record, handle in records_over(tensor.untyped_storage(), tensor._version, books):
        if record.span is not None:
            restored = books.rejoin(record, tensor, layout)
            if restored is not None:
                return handle, restored
        elif record.root is root and books.join(record, layout, tensor.nbytes):
            return handle, layout
    return None

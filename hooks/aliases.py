"""Views of one storage are stored once, where that is safe.

That two saved tensors share a storage and show the same version does not prove that the same bytes were saved: one
storage can be written through several version counters (the parts of `unsafe_chunk`, `.data`, a numpy workspace). So a
saved tensor joins an earlier record only if three things hold: both are views of the same living tensor, which means
one counter; both have the same version; and none of the record's bytes has been read yet.

Double backward and reentrant checkpointing save again what was restored. Autograd gives it to its functions as new
tensors, and nothing shows that they share a counter with the record's. Such a tensor joins only if a checksum confirms
that the bytes in memory are those on disk. Its own counter is then kept beside the record's.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from tierstore.residency.handle import Handle
from tierstore.residency.layout import Layout
from tierstore.residency.ownership import records_over
from tierstore.residency.residency import Residency

__all__ = ["Joined", "join_record"]


class Joined(NamedTuple):
    """A record that already holds a tensor's bytes, and the tensor's layout over the storage that the record was made
    of.

    `is_restored`: the tensor lies over restored bytes; it may have another version counter than the record.
    """

    handle: Handle
    layout: Layout
    is_restored: bool


def join_record(
    residency: Residency, tensor: torch.Tensor, root: weakref.ref[torch.Tensor], layout: Layout
) -> Joined | None:
    """Let a tensor share the record that holds its bytes too; None: it needs a record of its own.

    `root`: the tensor's base, or the tensor itself.
    """
    for record, handle in records_over(tensor.untyped_storage(), tensor._version, residency):
        if record.span is not None:
            restored = residency.rejoin(record, tensor, layout)
            if restored is not None:
                return Joined(handle, restored, is_restored=True)
        elif record.root is root and residency.join(record, layout, tensor.nbytes):
            return Joined(handle, layout, is_restored=False)
    return None

"""Small saved tensors that leave memory together, as one record.

NOTE [Groups]
A record of its own costs a tensor of 64 KiB more time than its bytes take to a drive. So small tensors in host memory
stay noted until there are enough of them (NOTE [Small tensors] in `rules/windows.py`). Those that are the store's alone
are then copied, one behind the other, into one slot, and their own memory is freed. The slot has one record. It is
written, read, evicted and released as one. Each member is handed out as a view of it.

* The members of a group are of one graph, one dtype and one planned place. They are ours alone when they are copied,
  and nobody can come to hold them later: only the group refers to their bytes.
* Each member keeps the version counter of the tensor that was saved, without its bytes (`Member.counter`). So a change
  of one member in place is seen as a change of that one, as without a store, and of no other.
* A group is asked for once for each member. It counts as used only when no member is asked for any more.
* The group is released when its last member is. Until then the others take room, at most the size of a group.

Tensors in a trace have no groups: the trace tells of each of them.
"""

from __future__ import annotations

from ctypes import memmove
from typing import NamedTuple

import torch

from ..errors import ModifiedInPlaceError
from ..rules.groups import Group
from .handle import Handle
from .layout import Layout, alias_of, describe, layout_of
from .lent import in_use
from .noted import NotedTensor
from .ownership import holds_alone
from .slab import Slot

__all__ = ["Member", "become_members", "copy_into", "may_join"]

_EMPTY = torch.empty(0, device="cpu")


class Member(NamedTuple):
    """A saved tensor in a group.

    `counter`: has its version counter, and no bytes. `version`: when it was saved. `first_byte`: where the tensor's own
    storage begins in the group.
    """

    counter: torch.Tensor
    version: int
    first_byte: int

    def in_group(self, layout: Layout) -> Layout:
        """The geometry over the group of a tensor that has `layout` over its own storage."""
        dtype, size, stride, offset, conj, neg = layout
        return Layout(dtype, size, stride, offset + self.first_byte // dtype.itemsize, conj, neg)

    def check_unchanged(self, layout: Layout) -> None:
        if self.counter._version != self.version:
            raise ModifiedInPlaceError(describe(layout), self.version, self.counter._version)


def may_join(noted: NotedTensor, largest_bytes: int) -> bool:
    """Whether a noted tensor may join a group: only its alias holds its memory, and nobody was handed that alias."""
    log = noted.log
    nbytes = log.sizes[noted.index]
    alias, noted.alias = noted.alias, None
    if alias is None:
        return False
    aliases = (alias,)
    del alias  # `in_use` counts references
    try:
        is_small = log.gathers and 0 < nbytes <= largest_bytes
        is_ours = is_small and holds_alone(aliases[0], noted.storage_id, noted.address, nbytes)
        return is_ours and not in_use(aliases)
    finally:
        noted.alias = aliases[0]


def copy_into(slot: Slot, group: Group[NotedTensor]) -> None:
    """Copy the members' bytes into the group's slot."""
    for noted, first_byte in zip(group.tensors, group.first_bytes, strict=True):
        memmove(slot.address + first_byte, noted.address, noted.log.sizes[noted.index])


def become_members(group: Group[NotedTensor], handle: Handle) -> None:
    """The bytes are in the group's slot now. The tensors' own memory is freed."""
    for noted, first_byte in zip(group.tensors, group.first_bytes, strict=True):
        alias = noted.alias
        if alias is None:
            raise RuntimeError(f"tensor {noted.key} is booked already")
        layout = layout_of(alias)
        counter = alias_of(alias, layout) if layout.conj or layout.neg else alias
        noted.log.join_group(noted.index, handle.record, Member(counter, noted.version, first_byte))
        noted.become(handle, layout)
        del alias
        counter.data = _EMPTY

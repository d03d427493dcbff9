"""Small saved tensors that leave memory together, as one record.

NOTE [Groups]
A record of its own costs a tensor of 64 KiB more time than its bytes take to a drive. So small tensors in host memory
stay noted until there are enough of them (NOTE [Small tensors] in `rules/windows.py`). Those that are the store's alone
are then copied, one behind the other, into one slot, and their own memory is freed. The slot has one record. It is
written, read, evicted and released as one. Each member is handed out as a view of it.

* The members of a group are of one graph, one dtype and one planned place. They are ours alone when they are copied,
  and nobody can come to hold them later: only the group refers to their bytes.
* A small tensor that others still hold stays noted once more: the next operations may let go of it. Then it is booked.
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
from .ownership import CLAIMS_ATTRIBUTE, holds_alone
from .slab import Slot

__all__ = ["Member", "become_members", "copy_into", "may_join", "may_join_later"]

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


def may_join(tensors: list[NotedTensor], nbytes: int) -> bool:
    """Whether all that holds a storage are the aliases of these noted tensors, and nobody was handed one of them."""
    aliases = [noted.alias for noted in tensors if noted.alias is not None]
    if len(aliases) < len(tensors):
        return False
    first = tensors[0]
    if not holds_alone(aliases, first.storage_id, first.address, nbytes):
        return False
    for noted in tensors:
        noted.alias = None  # `in_use` counts references
    try:
        return not in_use(aliases)
    finally:
        for noted, alias in zip(tensors, aliases, strict=True):
            noted.alias = alias


def may_join_later(tensors: list[NotedTensor]) -> bool:
    """Whether a storage that others hold may be ours alone the next time: it is new, and no record has an alias."""
    alias = tensors[0].alias
    is_new = all(noted.index >= noted.log.num_sorted for noted in tensors)
    return is_new and alias is not None and CLAIMS_ATTRIBUTE not in alias.untyped_storage().__dict__


def copy_into(slot: Slot, group: Group[list[NotedTensor]]) -> None:
    """Copy the bytes of all storages into the group's slot."""
    for (noted, *_), first_byte in zip(group.parts, group.first_bytes, strict=True):
        memmove(slot.address + first_byte, noted.address, noted.log.sizes[noted.index])


def become_members(group: Group[list[NotedTensor]], handle: Handle) -> None:
    """The bytes are in the group's slot now. The tensors' own memory is freed."""
    for tensors, first_byte in zip(group.parts, group.first_bytes, strict=True):
        for noted in tensors:
            alias = noted.alias
            if alias is None:
                raise RuntimeError(f"tensor {noted.key} is booked already")
            layout = layout_of(alias)
            counter = alias_of(alias, layout) if layout.conj or layout.neg else alias
            noted.log.join_group(noted.index, handle.record, Member(counter, noted.version, first_byte))
            noted.become(handle, layout)
            del alias
            counter.data = _EMPTY

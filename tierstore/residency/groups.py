"""Saved tensors that leave memory together, as one record.

NOTE [Groups]
A record of its own costs a tensor of 64 KiB more time than its bytes take to a drive. So small tensors in host memory
stay tracked until there are enough of them (NOTE [Small tensors] in `ledger/windows.py`). Those that are the store's
alone are then copied, one behind the other, into one slot, and their own memory is freed. The slot has one record. It
is written, read, evicted and released as one. Each member is handed out as a view of it.

* The members of a group are of one graph, one dtype and one planned tier. The store is their sole owner when they are
  copied, and nobody can come to hold them later: only the group refers to their bytes.
* A small tensor that others still hold stays tracked once more: the next operations may let go of it. Then it is
  registered.
* Each member keeps the version counter of the tensor that was saved, without its bytes (`Member.counter`). So a change
  of one member in place is seen as a change of that one, as without a store, and of no other.
* Members that are one and the same saved tensor are handed out as one object: see NOTE [Stolen gradients] in
  `handing_out.py`.
* A group is asked for once for each member. It counts as used only when no member is asked for any more.
* The group is released when its last member is. Until then the others take room, at most the size of a group.

On an accelerator small tensors that have to leave stay tracked until there are enough of them (NOTE [Tracked on a
device] in `ledger/on_device.py`). Then they are gathered in new memory of the device, on the stream that packed them:
by one kernel, and one copy serves all. That memory is the source of the group's record, which moves like any other.

* The members of such a group also have one stream. Where that is not the stream of the thread that gathers, where it is
  being captured, or where the device has no room for both, each tensor leaves by itself.
* A member begins at a multiple of 512 bytes, as a block of the device's allocator does.
* A full device that has no room for a group gets the member that is asked for, in memory of its own.

Larger ones leave an accelerator in *batches*. A batch is a group whose members are not gathered: it has one record, one
slot of host memory, one wait and one event each way. Each storage is copied from where it lies to its place in the
slot, and comes back to memory of its own. So backward asks the device's allocator for blocks of the sizes that forward
has freed.

* A batch has at most a quarter of the bytes that may be on their way out, and half of what staging holds. What is
  larger than half a batch leaves alone, at once.
* It moves as one, also in what it takes of each window.

Tensors in a trace have no groups: the trace tells of each of them."""

from __future__ import annotations

from ctypes import memmove

import torch

from ..ledger.groups import Group, Part
from .handle import Handle, Member
from .layout import Layout, alias_of, layout_of
from .outstanding import in_use
from .ownership import holds_alone
from .slab import Slot
from .tracked import TrackedTensor

_EMPTY = torch.empty(0, device="cpu")


def take_if_sole_owner(tensors: list[TrackedTensor], nbytes: int) -> Part[TrackedTensor] | None:
    """The part of a group that these tracked tensors become; None: others hold their storage, or were handed an alias.

    Nobody can be handed an alias that was taken: who asks for the tensor meanwhile waits for the lock of the store."""
    aliases = []
    for tracked in tensors:
        if tracked.alias is None:
            return None
        aliases.append(tracked.alias)
    first = tensors[0]
    if not holds_alone(aliases, first.storage_id, first.address, nbytes):
        return None
    part = Part(tensors, aliases, aliases[0].dtype)
    for tracked in tensors:
        tracked.alias = None
    if in_use(aliases):
        part.give_back()
        return None
    return part


def copy_into(slot: Slot, group: Group[TrackedTensor]) -> None:
    """Copy the bytes of all parts into the group's slot."""
    for part, first_byte in zip(group.parts, group.first_bytes, strict=True):
        tracked = part.tensors[0]
        memmove(slot.address + first_byte, tracked.address, tracked.log.packs[tracked.index][1])


def become_members(group: Group[TrackedTensor], handle: Handle, empty: torch.Tensor | None) -> None:
    """The bytes are in the group's memory now. The tensors' own is freed: they lie over `empty` (None: the CPU's)."""
    empty = _EMPTY if empty is None else empty
    members = [tracked for part in group.parts for tracked in part.tensors]
    log = members[0].log
    for part, first_byte in zip(group.parts, group.first_bytes, strict=True):
        numbers: dict[tuple[int, int, Layout], int] = {}
        for tracked, alias in zip(part.tensors, part.aliases, strict=True):
            tracked.layout = layout = layout_of(alias)
            counter = alias_of(alias, layout) if layout.conj or layout.neg else alias
            number = tracked.index
            if len(part.tensors) > 1:  # the members keep the weak references, so no id is used twice
                number = numbers.setdefault((id(tracked.root), tracked.version, layout), number)
            log.members[tracked.index] = Member(counter, tracked.version, first_byte, number)
            counter.data = empty
        part.aliases.clear()
    log.come_in([tracked.index for tracked in members], handle.record)
    for tracked in members:
        tracked.handle = handle  # last: who asks for the tensor meanwhile waits for the lock of the store

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

from collections.abc import Mapping
from ctypes import memmove
from itertools import accumulate

import torch

from ..ledger.groups import Group
from ..ledger.registration import Storage
from ..tensors.layout import Layout, alias_of, layouts_of
from ..tensors.slab import Slot
from .handle import Handle, new_member
from .outstanding import in_use
from .ownership import hold_alone
from .tracked import TrackedTensor

_EMPTY = torch.empty(0, device="cpu")


def take_if_sole_owner(
    by_storage: Mapping[Storage, list[TrackedTensor]],
) -> dict[Storage, tuple[torch.dtype, list[torch.Tensor]]]:
    """Take the aliases of tracked tensors whose storage nobody else holds, and of which nobody was handed an alias.
    Returns the dtype and the aliases for each such storage.

    Nobody can be handed an alias that was taken: who asks for the tensor meanwhile waits for the lock of the store."""
    of_storages = by_storage.values()
    tensors = [tracked for of_storage in of_storages for tracked in of_storage]
    aliases = [tracked.alias for tracked in tensors if tracked.alias is not None]
    if len(aliases) < len(tensors):
        raise RuntimeError("a tracked tensor is registered already")
    for tracked in tensors:
        tracked.alias = None
    used = set(map(id, in_use(aliases)))  # before anything else refers to them
    sums = list(accumulate(map(len, of_storages), initial=0))
    starts, ends, firsts = sums[:-1], sums[1:], [of_storage[0] for of_storage in of_storages]
    as_saved = [
        (end - start, first.address, first.log.packs[first.index][1])
        for first, start, end in zip(firsts, starts, ends, strict=True)
    ]
    are_ours = hold_alone([aliases[start] for start in starts], [first.storage_id for first in firsts], as_saved)
    taken = {}
    for storage, start, end, is_ours in zip(by_storage, starts, ends, are_ours, strict=True):
        of_storage = aliases[start:end]
        if is_ours and (not used or used.isdisjoint(map(id, of_storage))):
            taken[storage] = of_storage[0].dtype, of_storage
        else:
            for tracked, alias in zip(by_storage[storage], of_storage, strict=True):
                tracked.alias = alias
    return taken


def copy_into(slot: Slot, group: Group[TrackedTensor]) -> None:
    """Copy the bytes of all storages into the group's slot."""
    for first_byte, (tracked, _) in group.storages.items():
        memmove(slot.address + first_byte, tracked.address, tracked.log.packs[tracked.index][1])


def become_members(group: Group[TrackedTensor], handle: Handle, empty: torch.Tensor | None) -> None:
    """The bytes are in the group's memory now. The tensors' own is freed: they lie over `empty` (None: the CPU's)."""
    empty = _EMPTY if empty is None else empty
    tensors, aliases, log = group.tensors, group.aliases, group.tensors[0].log
    are_some_shared = len(set(group.first_bytes)) < len(tensors)
    numbers: dict[tuple[int, int, int, Layout], int] = {}
    for tracked, alias, layout, first_byte in zip(
        tensors, aliases, layouts_of(aliases), group.first_bytes, strict=True
    ):
        tracked.layout = layout
        counter = alias_of(alias, layout) if layout.conj or layout.neg else alias
        number = tracked.index
        if are_some_shared:  # the members keep the weak references, so no id is used twice
            number = numbers.setdefault((first_byte, id(tracked.root), tracked.version, layout), number)
        log.members[tracked.index] = new_member((counter, tracked.version, first_byte, number))
        counter.data = empty
    aliases.clear()
    log.come_in([tracked.index for tracked in tensors], handle.record)
    for tracked in tensors:
        tracked.handle = handle  # last: who asks for the tensor meanwhile waits for the lock of the store

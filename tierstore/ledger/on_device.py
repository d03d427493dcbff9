"""Saved tensors on accelerators that have no record yet: the store only charges their bytes to the device's window.

NOTE [Tracked on a device]
A tensor on an accelerator that stays there for now needs no record either (NOTE [Tracked, then registered] in
`tracked.py`). It is *tracked* as long as the window of what stays on devices has room for it, and the plan, if there is
one, does not send it away. The window is charged with its bytes at once, whoever else holds them. All tracked tensors
are registered when the window is short of room. Then the same tensors leave as if each had been registered when it was
packed. From then on the log that was short of room registers each tensor when it is packed, if it is large.

A tensor that has to leave, by the plan or because its log was short of room, is tracked too, unless it is large. It
*leaves* when there are enough of them for a group or a batch (NOTE [Groups] in `residency/groups.py`), or at the end of
the scope. So the window may be exceeded by a batch, a quarter of what may be on its way out (`FLIGHT_BYTES`) at most.

Views of one storage in one log are charged once. A tracked tensor that dies goes into a queue, and the next call of the
store gives its room back. Backward makes no call for a tracked tensor. If something of its graph has left, every eighth
one that it asks for makes a call all the same, so that the room of those before is used to bring back what comes next.

NOTE [Held elsewhere]
What the program holds too takes no room, since to move it would free nothing: a buffer, the input batch, the output of
a scope. A record would tell, but as long as all of its graph stays where it is, the record is of no other use, and it
costs most of all: a decoder saves the cosines and sines of its positions four times in each layer. So when owners are
counted, at the end of a scope and as backward begins, tracked tensors whose storage has more owners than there are
tracked tensors over it, in all logs, stay tracked, and their charge is given back (`GraphLog.held_elsewhere`). What
others have let go by the next look is charged again. What they hold to the end counts as kept, as for a record.

Where something of the graph has to leave, by the plan or because room was short, such a tensor has a record, and so has
one over a storage that a living record is of. What another store has tracked looks as if the program held it, until it
is registered.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..base.remains import Remains
from .windows import Window

if TYPE_CHECKING:
    from .log import GraphLog, LogRemains

T = TypeVar("T")


class DeviceReference(weakref.ref[T]):
    """Refers weakly to a tracked tensor, and goes into a queue when that dies: see NOTE [No finalizers]."""

    __slots__ = ("index", "log_number", "storage_id")

    index: int
    log_number: int
    storage_id: int


class UnseenGraph:
    """Lives as long as a graph of which autograd keeps something by itself: NOTE [Hooks off] in `whole_graphs.py`."""

    __slots__ = ("__weakref__",)


class UnseenBytes(Remains[UnseenGraph]):
    """What such a graph is charged with. `nbytes`: set by who makes it."""

    __slots__ = ("nbytes",)

    nbytes: int


class DeviceBytes:
    """What the window of a device is charged with for tracked tensors. Guarded by the store's lock.

    `log.storages` has, for each storage with tracked tensors, how many there are, the bytes that are charged, and the
    first of them. `log.held_elsewhere` has the bytes of those that are charged nothing: see NOTE [Held elsewhere].

    Attributes:
        dead: tensors that have died, and that nobody has accounted for yet. `note_death`: what is called then.
        resident: the window. `note_kept`: told the bytes of what others held to the end.
        unseen: the graphs of which autograd keeps something by itself.
    """

    note_kept: Callable[[int], None]

    def __init__(self, resident: Window) -> None:
        self.dead: deque[DeviceReference[Any]] = deque()
        self.resident = resident
        self.note_death: Any = self.dead.append
        self.unseen: set[UnseenBytes] = set()

    def add(self, tracked: object, log: GraphLog[Any, Any], index: int, storage_id: int, nbytes: int) -> None:
        reference = DeviceReference(tracked, self.note_death)
        reference.index, reference.log_number, reference.storage_id = index, log.number, storage_id
        log.on_device[index] = reference
        storages = log.storages
        if storage_id in storages:
            storages[storage_id][0] += 1
        else:
            storages[storage_id] = [1, nbytes, reference]
            self.resident.used_bytes += nbytes

    def charge_unseen(self, graph: UnseenGraph, nbytes: int, note_death: Callable[[UnseenBytes], None]) -> None:
        """Autograd keeps that much of the graph by itself."""
        unseen = UnseenBytes(graph, note_death)
        unseen.nbytes = nbytes
        self.unseen.add(unseen)
        self.resident.used_bytes += nbytes

    def end_unseen(self, unseen: UnseenBytes) -> None:
        """That graph is gone, or the store is closed."""
        if unseen in self.unseen:
            self.unseen.remove(unseen)
            self.resident.used_bytes -= unseen.nbytes

    def give_back(self, log: GraphLog[Any, Any], index: int) -> None:
        """Others hold the storage of that tensor too: charge nothing for it."""
        storage_id = log.on_device[index].storage_id
        charged = log.storages[storage_id]
        self.resident.used_bytes -= charged[1]
        charged[1] = 0
        _, log.held_elsewhere[storage_id] = log.packs[index]

    def charge(self, log: GraphLog[Any, Any], storage_id: int) -> None:
        """They hold it no longer."""
        nbytes = log.storages[storage_id][1] = log.held_elsewhere.pop(storage_id)
        self.resident.used_bytes += nbytes

    def drop_dead(self, logs: Mapping[int, LogRemains]) -> list[LogRemains]:
        """Charge nothing for dead tensors any more. `logs`: by number; returns those that are changed."""
        if not logs:
            self.dead.clear()
        changed: dict[int, LogRemains] = {}
        dead, freed_bytes = self.dead, 0
        while dead:
            reference = dead.popleft()
            number, index = reference.log_number, reference.index
            if number in logs and index in logs[number].on_device:  # else it died before it was entered
                log, storage_id = logs[number], reference.storage_id
                changed[number] = log
                del log.on_device[index]
                if storage_id in log.storages:  # else the store is closed
                    charged = log.storages[storage_id]  # as in `remove`, but without calls: there may be many
                    charged[0] -= 1
                    if not charged[0]:
                        del log.storages[storage_id]
                        freed_bytes += charged[1]
                        if storage_id in log.held_elsewhere:
                            self.note_kept(log.held_elsewhere.pop(storage_id))
        self.resident.used_bytes -= freed_bytes
        return list(changed.values())

    def remove(self, log: GraphLog[Any, Any], indices: Iterable[int]) -> None:
        on_device, storages = log.on_device, log.storages
        for index in indices:
            storage_id = on_device[index].storage_id
            del on_device[index]
            charged = storages[storage_id]
            charged[0] -= 1
            if log.held_elsewhere:
                log.held_elsewhere.pop(storage_id, None)  # the record will tell
            if not charged[0]:
                del storages[storage_id]
                self.resident.used_bytes -= charged[1]

    def end(self, log: LogRemains, *, is_gone: bool) -> None:
        """Charge nothing for the log any more: it is gone, or the store is closed."""
        self.resident.used_bytes -= sum([nbytes for _, nbytes, _ in log.storages.values()])
        if is_gone:
            for nbytes in log.held_elsewhere.values():
                self.note_kept(nbytes)
        log.storages.clear()
        log.held_elsewhere.clear()

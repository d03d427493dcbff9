"""Simulated storages, the saved tensors that are views of them, and the records: as much as the rules look at."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

from ..ledger.log import GraphLog
from ..ledger.record import RuledRecord
from .workload import Saved


class SimulatedStorage:
    """Who holds a storage.

    Attributes:
        is_held: somebody else holds it. `is_shared`: as long as the graph lives.
        is_taken: autograd is just taking a tracked tensor over it, and holds it too.
        tensors: the saved tensors over it, dead ones included.
        record: the last that was made of it; None: none was.
    """

    def __init__(self, *, is_shared: bool, is_held: bool) -> None:
        self.is_shared = is_shared
        self.is_held = is_shared or is_held
        self.is_taken = False
        self.tensors: list[weakref.ref[SimulatedTensor]] = []
        self.record: SimulatedRecord | None = None

    def let_go(self) -> None:
        self.is_held = self.is_shared

    @property
    def num_tracked(self) -> int:
        """How many living tensors without a record hold it."""
        return sum(1 for each in self.tensors if (tracked := each()) is not None and tracked.handle is None)

    def is_held_by(self, num_tracked: int) -> bool:
        """Whether so many tracked tensors are all that ever held it, and hold it now."""
        return not (self.is_held or self.is_taken or self.record) and self.num_tracked == num_tracked


class SimulatedTensor:
    """What a simulated graph holds in the place of a saved tensor. See `TrackedTensor`."""

    alias = device = stream = None
    index: int

    def __init__(self, saved: Saved, storage: SimulatedStorage, key: int, log: SimulatedLog) -> None:
        self.saved = saved
        self.storage = storage
        self.storage_id = id(storage)
        self.key = key
        self.log = log
        self.handle: SimulatedHandle | None = None


class SimulatedMember(NamedTuple):
    """A member of a simulated group: where its bytes begin there."""

    first_byte: int


class SimulatedHandle:
    """Keeps a record alive, for the saved tensors that are views of it."""

    record: SimulatedRecord


class SimulatedRecord(RuledRecord):
    """The bytes of one storage. See `RuledRecord`.

    Attributes:
        storage: that autograd saved.
        is_in_place: its bytes have not left that storage.
        is_read: its bytes have been read: no other saved tensor becomes a view of it.
    """

    has_device_bytes = False

    def __init__(
        self, handle: SimulatedHandle, note_release: Callable[[SimulatedRecord], None], first: SimulatedTensor
    ) -> None:
        super().__init__(first.key, first.saved.nbytes)
        self.storage = first.storage
        self.kind = first.saved.kind
        self.codec = ""
        self.is_in_place, self.is_read = True, False
        handle.record = first.storage.record = self

    @property
    def span_bytes(self) -> int:
        return self.nbytes

    def is_sole_owner(self) -> bool:
        """Whether only records hold its storage, and it is not gone itself."""
        storage = self.storage
        return self.is_alive and not (storage.is_held or storage.is_taken or storage.num_tracked)

    def become_group(self, num_members: int, nbytes: int) -> None:
        self.num_members, self.nbytes = num_members, nbytes
        self.is_in_place, self.is_read, self.slot = False, True, self


SimulatedLog = GraphLog[SimulatedTensor, SimulatedRecord]

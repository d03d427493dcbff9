"""Memory without bytes, for the rules: who holds a storage, how records are made, and which of them have a slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..ledger.books import Books
from ..ledger.groups import Group
from ..ledger.registration import RegistrationRules, Storage
from ..ledger.tracked import TrackedTensors
from ..ledger.windows import HostWindows, Window
from .record import SimulatedHandle, SimulatedMember, SimulatedRecord, SimulatedTensor


class SimulatedRegistration(RegistrationRules[SimulatedTensor, SimulatedRecord]):
    """The records of one rank, and the saved tensors that have none yet."""

    def __init__(
        self, books: Books[SimulatedRecord], tracked: TrackedTensors[SimulatedTensor, SimulatedRecord]
    ) -> None:
        super().__init__(books, tracked)
        self._note_release = books.released.append

    @staticmethod
    def may_be_registered(tracked: SimulatedTensor) -> bool:
        return tracked.storage.record is not None

    @staticmethod
    def _handle_of_same_bytes(tracked: SimulatedTensor) -> SimulatedHandle | None:
        record = tracked.storage.record
        return None if record is None or record.is_read else record()

    @staticmethod
    def _num_owners(by_storage: Mapping[int, Sequence[SimulatedTensor]]) -> Iterable[int]:
        for tensors in by_storage.values():
            storage = tensors[0].storage
            record = storage.record
            has_alias = record is not None and record.is_in_place and record.is_alive
            yield storage.num_tracked + storage.is_held + has_alias

    @staticmethod
    def _take_if_ours(
        by_storage: Mapping[Storage, list[SimulatedTensor]],
    ) -> dict[Storage, tuple[Any, list[Any]]]:
        return {
            key: (tensors[0].saved.kind, [None] * len(tensors))
            for key, tensors in by_storage.items()
            if tensors[0].storage.is_held_by(len(tensors))
        }

    def new_handle(self, tracked: SimulatedTensor) -> SimulatedHandle:
        handle = SimulatedHandle()
        SimulatedRecord(handle, self._note_release, tracked)
        return handle

    _handle_of = new_handle

    def _handle_of_group(self, group: Group[SimulatedTensor]) -> SimulatedHandle:
        handle = self.new_handle(group.tensors[-1])
        handle.record.become_group(len(group.tensors), group.nbytes)
        return handle

    def _become_members(self, group: Group[SimulatedTensor], handle: SimulatedHandle) -> None:
        for tracked, first_byte in zip(group.tensors, group.first_bytes, strict=True):
            tracked.log.members[tracked.index] = SimulatedMember(first_byte)
            self._become(tracked, handle, is_view=True)

    @staticmethod
    def _become(tracked: SimulatedTensor, handle: SimulatedHandle, *, is_view: bool) -> None:
        tracked.handle = handle
        tracked.log.come_in((tracked.index,), handle.record)


class SimulatedMemory:
    """A `Memory`. Methods as `StoreMemory`'s."""

    cached_bytes = 0

    @property
    def pages(self) -> SimulatedMemory:
        return self

    def __init__(self, windows: HostWindows) -> None:
        self.tracked = TrackedTensors[SimulatedTensor, SimulatedRecord](windows, Window(0))
        self.books = Books[SimulatedRecord](windows, self.tracked, SimulatedRecord.is_sole_owner)
        self.registration = SimulatedRegistration(self.books, self.tracked)
        self.register_settled = self.registration.register_all
        self._returned: list[None] = []  # slots
        self.unaccounted = self.tracked.ended, self._returned

    # --- slots and jobs -----------------------------------------------------------------------------------------------

    @staticmethod
    def has_sole_owner(record: SimulatedRecord) -> bool:
        return not record.is_in_place or record.is_sole_owner()

    @staticmethod
    def prepare_read(record: SimulatedRecord) -> None:
        record.slot = record

    @staticmethod
    def free(record: SimulatedRecord) -> None:
        record.slot = None

    @staticmethod
    def begin_write(record: SimulatedRecord) -> int:
        record.is_read, record.held = True, record
        return record.nbytes

    @staticmethod
    def begin_read(record: SimulatedRecord) -> int:
        record.held = record
        return record.nbytes

    def empty_tensors(self, record: SimulatedRecord) -> None:
        record.is_in_place = False

    # --- what has died ------------------------------------------------------------------------------------------------

    def give_back_outstanding(self) -> None:
        self._returned.append(None)

    def take_back(self) -> None:
        self._returned.clear()

    def catch_up(self) -> bool:
        has_died = bool(self.tracked.ended or self._returned)
        self.tracked.drop_ended()
        self.take_back()
        return has_died

    # --- there are no bytes ---------------------------------------------------------------------------------------

    def _nothing(self, *_: object, **__: object) -> None: ...

    def _yes(self, *_: object) -> bool:
        return True

    def _none(self, *_: object) -> bool:
        return False

    trim = prepare_offload = give_up = _nothing
    has_room_for_read = attach = _yes
    outstanding_bytes = has_moved = _none

"""From tracked to registered: see NOTE [Tracked, then registered] in `tracked.py`.

The caller holds the store's lock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic

from .books import Books
from .groups import Group, Grouping, Part
from .log import GraphLog, T
from .record import R
from .tracked import TrackedTensors


class RegistrationRules(ABC, Generic[T, R]):
    """All records, and the saved tensors that have none yet. A subclass knows who holds a storage, and makes records.

    A handle is what keeps a record alive, and has it as its `record`."""

    def __init__(self, books: Books[R], tracked: TrackedTensors[T, R]) -> None:
        self.tracked = tracked
        self._windows = books.windows
        self._records = books.records
        self._pending = books.pending
        self._counters = books.counters

    # --- the seam -----------------------------------------------------------------------------------------------

    @abstractmethod
    def may_be_registered(self, tracked: T) -> bool:
        """Whether any record, dead or alive, was made of the tensor's storage."""

    @abstractmethod
    def _handle_of_same_bytes(self, tracked: T) -> Any:
        """Of the record that the tensor may share: it has the same bytes, and they have not been read. None: none."""

    @abstractmethod
    def _num_owners(self, by_storage: Mapping[int, Sequence[T]]) -> Iterable[int]:
        """How many owners each of the storages has. Tracked tensors over it, which are given with it, are owners."""

    @abstractmethod
    def _take_if_ours(self, tensors: list[T], nbytes: int) -> Part[T] | None:
        """The part of a group that these tracked tensors become; None: others hold their storage."""

    @abstractmethod
    def _handle_of_group(self, group: Group[T], members: Sequence[T]) -> Any:
        """Copy the group into memory of its own. None: there is none; then each leaves from where it lies."""

    @abstractmethod
    def _become_members(self, group: Group[T], handle: Any) -> None:
        """The tensors have that handle now, and their own memory is freed."""

    @abstractmethod
    def _handle_of(self, tracked: T) -> Any:
        """A new one. None: the store is closed."""

    @abstractmethod
    def _become(self, tracked: T, handle: Any, *, is_view: bool) -> None:
        """The tensor has that handle now. `is_view`: so have others."""

    def _count_views(self, tensors: Sequence[T]) -> None:
        """These tensors have one storage."""

    def _stay_tracked(self, tensors: Sequence[T], num_owners: int) -> bool:
        """Whether these tensors of one storage, which has `num_owners`, need no record all the same."""
        return False

    # --- the rules ----------------------------------------------------------------------------------------------

    def register_all(self) -> None:
        """Register everything in host memory that is settled. Small tensors become groups: see NOTE [Groups]."""
        if not self.tracked.num_bytes:
            return
        windows = self._windows
        self._register_sorted(self.tracked.take(), Grouping(windows.group_bytes, windows.member_bytes))
        self.tracked.end_round()

    def _register_sorted(self, tensors: Iterable[T], grouping: Grouping[T], *, may_wait: bool = True) -> None:
        by_storage: dict[tuple[int, int], list[T]] = {}
        for tracked in tensors:
            by_storage.setdefault((tracked.log.number, tracked.storage_id), []).append(tracked)
        for of_storage in by_storage.values():
            self._sort_in(of_storage, grouping, may_wait=may_wait)
        for group in grouping.rest():
            self._register_group(group)

    def _sort_in(self, tensors: list[T], grouping: Grouping[T], *, may_wait: bool) -> None:
        """`tensors`: all of one storage that are tracked and settled."""
        first = tensors[0]
        log = first.log
        _, nbytes = log.packs[first.index]
        is_small = 0 < nbytes <= grouping.largest_bytes and log.gathers
        part = self._take_if_ours(tensors, nbytes) if is_small else None
        if part is not None:
            planned = None if log.plan is None else log.plan.tier(first.index)
            group = grouping.add(part, nbytes, (log.number, part.kind, planned, first.stream))
            if group is not None:
                self._register_group(group)
        elif (
            is_small
            and may_wait
            and all(tracked.index >= tracked.log.num_sorted for tracked in tensors)
            and not self.may_be_registered(first)
        ):  # the storage is new, and no record has an alias: the store may be the sole owner the next time
            self.tracked.put_back(tensors)
        else:
            for tracked in tensors:
                self._register(tracked)

    def _register_group(self, group: Group[T]) -> None:
        if len(group.parts) == 1 or not self._register_together(group):
            for part in group.parts:
                part.give_back()
                for tracked in part.tensors:
                    self._register(tracked)

    def _register_together(self, group: Group[T]) -> bool:
        members = [tracked for part in group.parts for tracked in part.tensors]
        handle = self._handle_of_group(group, members)
        if handle is None:
            return False
        log, record = members[0].log, handle.record
        log.assign_group(record, members)
        self._records[record.key] = record
        self._pending.settle((record,))
        self._become_members(group, handle)
        return True

    def register_one(self, tracked: T) -> None:
        """Its bytes may be read from now on."""
        self.tracked.remove(tracked)
        self._register(tracked)

    def register_over(self, storage_id: int) -> None:
        """Everything that is tracked over a living storage, in all graphs."""
        for tracked in [tracked for tracked in self.tracked.living() if tracked.storage_id == storage_id]:
            self.register_one(tracked)

    def is_registered(self, tracked: T) -> bool:
        """Whether there is a record of the same bytes, which it may share: then it takes no room."""
        return self._handle_of_same_bytes(tracked) is not None

    def join_if_registered(self, tracked: T) -> None:
        """Share the record of the same bytes, if there is one and it is unread. The tensor was just tracked."""
        handle = self._handle_of_same_bytes(tracked)
        if handle is not None:
            self.register_one(tracked)

    def scan_owners(self, log: GraphLog[T, R]) -> None:
        """Register what others also hold, so that it is known to be theirs."""
        by_storage = log.unscanned()
        for tensors, num_owners in zip(by_storage.values(), self._num_owners(by_storage), strict=True):
            num_tensors = len(tensors)
            if num_owners == num_tensors:
                if num_tensors > 1:
                    self._count_views(tensors)
            elif not self._stay_tracked(tensors, num_owners):
                for tracked in tensors:
                    self.register_one(tracked)

    def _register(self, tracked: T) -> None:
        handle = self._handle_of_same_bytes(tracked)
        is_view = handle is not None
        if not is_view:
            handle = self._handle_of(tracked)
            if handle is None:
                return
            record = handle.record
            tracked.log.assign(record, tracked.index)
            self._records[record.key] = record
            self._pending.settle((record,))
        self._become(tracked, handle, is_view=is_view)

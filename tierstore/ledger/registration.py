"""From tracked to registered: see NOTE [Tracked, then registered] in `tracked.py`.

The caller holds the store's lock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic

from .books import Books
from .groups import Group, Grouping
from .log import GraphLog, T
from .record import R
from .tracked import TrackedTensors

Storage = tuple[int, int]
"""The number of a log, and the id of a storage."""


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
    def _take_if_ours(self, by_storage: Mapping[Storage, list[T]]) -> Mapping[Storage, tuple[Any, list[Any]]]:
        """Take the aliases of tracked tensors, to make groups of them. Returns, for each storage that others do not
        hold, its dtype and the aliases; the others' are not taken."""

    @abstractmethod
    def _handle_of_group(self, group: Group[T]) -> Any:
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
        """`tensors`: of the storages that they have, all that are tracked and settled. No calls for each: there may be
        many."""
        by_storage: dict[Storage, list[T]] = {}
        for tracked in tensors:
            storage = tracked.log.number, tracked.storage_id
            if storage in by_storage:
                by_storage[storage].append(tracked)
            else:
                by_storage[storage] = [tracked]
        small = {
            storage: of_storage
            for storage, of_storage in by_storage.items()
            if 0 < (first := of_storage[0]).log.packs[first.index][1] <= grouping.largest_bytes and first.log.gathers
        }
        ours = self._take_if_ours(small)
        for storage, of_storage in by_storage.items():
            first = of_storage[0]
            if storage in ours:
                (kind, aliases), log = ours[storage], first.log
                planned = None if log.plan is None else log.plan.tier(first.index)
                key = log.number, kind, planned, first.stream
                group = grouping.add(of_storage, aliases, log.packs[first.index][1], key)
                if group is not None:
                    self._register_group(group)
            elif (
                storage in small
                and may_wait
                and all(tracked.index >= tracked.log.num_sorted for tracked in of_storage)
                and not self.may_be_registered(first)
            ):  # the storage is new, and no record has an alias: the store may be the sole owner the next time
                self.tracked.put_back(of_storage)
            else:
                for tracked in of_storage:
                    self._register(tracked)
        for group in grouping.rest():
            self._register_group(group)

    def _register_group(self, group: Group[T]) -> None:
        has_one_storage = not group.first_bytes[-1]
        if has_one_storage or not self._register_together(group):
            group.give_back()
            for tracked in group.tensors:
                self._register(tracked)

    def _register_together(self, group: Group[T]) -> bool:
        handle = self._handle_of_group(group)
        if handle is None:
            return False
        log, record = group.tensors[0].log, handle.record
        log.assign_group(record, group.tensors)
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

"""From noted to booked: see NOTE [Noted, then booked] in `noted.py`. The caller holds the store's lock."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..base.interrupts import is_interrupt
from ..ledger.books import Books
from ..ledger.groups import DEVICE_ALIGNMENT_BYTES, Group, Grouping
from ..ledger.windows import NUM_MEMBERS
from .device import Streams
from .groups import Part, become_members, copy_into, may_join_later, take_if_ours
from .handle import Handle, Record
from .handle_making import HandleFactory
from .layout import Layout, layout_of, unseen_by_modes
from .lent import LentViews
from .noted import NotedLog, NotedTensor, NotedTensors
from .ownership import CLAIMS_ATTRIBUTE, records_over
from .slab import Slot
from .slots import Slots


class Booking:
    """All records of a store, and the saved tensors that have none yet."""

    def __init__(
        self,
        books: Books[Record],
        handles: HandleFactory,
        noted: NotedTensors,
        lent_views: LentViews,
        slots: Slots,
        streams: Streams,
    ) -> None:
        self.noted = noted
        self._handles = handles
        self._streams = streams
        self._slots = slots
        self._begin_to_pin = slots.slab.begin_to_pin
        self._windows = books.windows
        self._records = books.records
        self._pending = books.pending
        self._counters = books.counters
        self._lent_views = lent_views

    def num_live(self) -> int:
        num_booked = sum(record.num_members for record in list(self._records.values()))
        return num_booked + sum(1 for _ in self.noted.living())

    def book_all(self) -> None:
        """Book everything in host memory that is settled. Small tensors become groups: see NOTE [Groups]."""
        if not self.noted.num_bytes:
            return
        windows = self._windows
        self._book_sorted(self.noted.take(), Grouping(windows.group_bytes, windows.member_bytes))
        self.noted.end_round()

    @unseen_by_modes
    def book_tracked(self, group_bytes: int, of: NotedLog | None = None) -> None:
        """Book what is tracked and settled, of one log or of all: NOTE [Tracked, then booked] in `tracked.py`.

        `group_bytes`: the most bytes of a group.
        """
        self._book_sorted(self.noted.take_tracked(of), self._grouping_on_device(group_bytes), may_wait=False)

    @unseen_by_modes
    def book_leaving(self, group_bytes: int, log: NotedLog, *, may_wait: bool) -> None:
        """Book what is tracked, is settled, and waits to leave. `may_wait`: what others hold waits once more."""
        self._book_sorted(self.noted.take_leaving(log), self._grouping_on_device(group_bytes), may_wait=may_wait)
        log.num_sorted = log.num_packs

    @staticmethod
    def _grouping_on_device(group_bytes: int) -> Grouping[Part]:
        return Grouping(group_bytes, group_bytes // NUM_MEMBERS, DEVICE_ALIGNMENT_BYTES)

    def _book_sorted(self, tensors: Iterable[NotedTensor], grouping: Grouping[Part], *, may_wait: bool = True) -> None:
        by_storage: dict[tuple[int, int], list[NotedTensor]] = {}
        for noted in tensors:
            by_storage.setdefault((noted.log.number, noted.storage_id), []).append(noted)
        for of_storage in by_storage.values():
            self._sort_in(of_storage, grouping, may_wait=may_wait)
        for group in grouping.rest():
            self._book_group(group)

    def _sort_in(self, tensors: list[NotedTensor], grouping: Grouping[Part], *, may_wait: bool) -> None:
        """`tensors`: all of one storage that are noted and settled."""
        first = tensors[0]
        log = first.log
        _, nbytes = log.packs[first.index]
        is_small = 0 < nbytes <= grouping.largest_bytes and log.gathers
        part = take_if_ours(tensors, nbytes) if is_small else None
        if part is not None:
            place = None if log.plan is None else log.plan.place_of(first.index)
            key = log.number, part.aliases[0].dtype, place, first.stream
            group = grouping.add(part, nbytes, key)
            if group is not None:
                self._book_group(group)
        elif is_small and may_wait and may_join_later(tensors):
            self.noted.put_back(tensors)
        else:
            self._book_each(tensors)

    def _book_each(self, tensors: Iterable[NotedTensor]) -> None:
        for noted in tensors:
            self._book(noted)

    def _book_group(self, group: Group[Part]) -> None:
        with torch.inference_mode(mode=False):  # `stats` may be called inside that mode, whose tensors have no version
            record = self._record_of(group) if len(group.parts) > 1 else None
        if record is None:
            for part in group.parts:
                part.give_back()
                self._book_each(part.tensors)

    def _record_of(self, group: Group[Part]) -> Record | None:
        """None: there is no memory for the group. Then each leaves from where it lies."""
        members = [noted for part in group.parts for noted in part.tensors]
        newest, dtype = members[-1], group.parts[0].aliases[0].dtype
        log, device = newest.log, newest.device
        slot, memory = self._copied(group) if device is None else (None, self._gathered(group, device))
        if memory is None:
            return None
        handle = self._handles.of_group(log.store, memory, newest.key, dtype, len(members))
        record = handle.record
        record.slot = slot
        if device is not None:
            record.device, record.stream = device, newest.stream
            self._begin_to_pin(device)
        log.place_group(record, members)
        self._records[record.key] = record
        self._pending.settle((record,))
        for part in group.parts:
            if len(part.tensors) > 1:
                self._count_joins(part.tensors, part.aliases)
        become_members(group, handle, None if device is None else self._streams.empty_on(memory.device))
        return record

    def _copied(self, group: Group[Part]) -> tuple[Slot | None, torch.Tensor | None]:
        try:
            slot = self._slots.allocate(group.nbytes)
        except OSError as error:
            if is_interrupt(error):  # a time limit's TimeoutError is an OSError too
                raise
            return None, None
        copy_into(slot, group)
        return slot, self._slots.hand_out(slot)

    def _gathered(self, group: Group[Part], device: torch.device) -> torch.Tensor | None:
        storages = [part.aliases[0] for part in group.parts]
        return self._streams.gather(storages, group.first_bytes, device, group.parts[0].tensors[0].stream)

    def book_one(self, noted: NotedTensor) -> None:
        """Its bytes may be read from now on."""
        self.noted.remove(noted)
        self._book(noted)

    @staticmethod
    def may_be_booked(noted: NotedTensor) -> bool:
        alias = noted.alias
        return alias is not None and CLAIMS_ATTRIBUTE in alias.untyped_storage().__dict__

    def is_booked(self, noted: NotedTensor) -> bool:
        """Whether there is a record of the same bytes, which it may share: then it takes no room."""
        return self._handle_of_same_bytes(noted) is not None

    def join_if_booked(self, noted: NotedTensor) -> None:
        """Share the record of the same bytes, if there is one and it is unread. The tensor was just noted."""
        handle = self._handle_of_same_bytes(noted)
        if handle is not None:
            self.noted.remove(noted)
            self._join(noted, handle)

    def survey(self, log: NotedLog) -> None:
        for group, is_ours_alone in self.noted.by_storage(log):
            if not is_ours_alone:
                for noted in group:
                    self.book_one(noted)
            elif len(group) > 1:
                self._count_joins(group, [noted.alias for noted in group])

    def _book(self, noted: NotedTensor) -> None:
        if noted.alias is None:
            return  # the store is closed
        handle = self._handle_of_same_bytes(noted)
        if handle is not None:
            self._join(noted, handle)
            return
        log = noted.log
        handle = self._handles.of_noted(noted)
        record = handle.record
        if record.device is not None:
            self._begin_to_pin(record.device)
        log.place(record, noted.index)
        self._records[record.key] = record
        self._pending.settle((record,))
        log.come_in((noted.index,), record)
        self._become(noted, handle, record.layout)

    def _become(self, noted: NotedTensor, handle: Handle, layout: Layout) -> None:
        """Replace the alias. Backward may have been given it: see NOTE [Stolen gradients] in `handing_out.py`."""
        handed_out = () if noted.alias is None else (noted.alias,)
        noted.become(handle, layout)
        self._lent_views.keep(handle.record, handed_out)

    @staticmethod
    def _handle_of_same_bytes(noted: NotedTensor) -> Handle | None:
        alias = noted.alias
        if alias is None or CLAIMS_ATTRIBUTE not in alias.untyped_storage().__dict__:  # as `may_be_booked`
            return None
        for record, handle in records_over(alias.untyped_storage(), noted.version, noted.log.residency):
            if record.span is None and record.source is not None and record.root is noted.root:
                return handle
        return None

    def _join(self, noted: NotedTensor, handle: Handle) -> None:
        layout = self._count_view(noted)
        handle.record.joined += (layout,)
        noted.log.come_in((noted.index,), handle.record)
        self._become(noted, handle, layout)

    def _count_view(self, noted: NotedTensor) -> Layout:
        alias = noted.alias
        if alias is None:
            raise RuntimeError(f"tensor {noted.key} is booked already")
        self._count_join(noted, alias)
        return layout_of(alias)

    def _count_joins(self, group: list[NotedTensor], aliases: list[torch.Tensor] | list[torch.Tensor | None]) -> None:
        seen = set()
        for noted, alias in zip(group, aliases, strict=True):
            view_of = id(noted.root), noted.version  # the group keeps the weak references, so no id is used twice
            if view_of in seen and alias is not None:
                self._count_join(noted, alias)
            seen.add(view_of)

    def _count_join(self, noted: NotedTensor, alias: torch.Tensor) -> None:
        if not noted.joined:
            noted.joined = True
            self._counters.packed_bytes -= noted.log.packs[noted.index][1]
            self._counters.deduplicated_bytes += alias.nbytes

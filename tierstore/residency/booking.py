"""From noted to booked: see NOTE [Noted, then booked] in `noted.py`. The caller holds the store's lock."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..base.interrupts import is_interrupt
from ..rules.groups import Group, Grouping
from ..rules.ledger import Ledger
from .groups import Part, become_members, copy_into, may_join_later, take_if_ours
from .handle import Handle, Record
from .layout import Layout, layout_of
from .lent import LentViews
from .noted import NotedLog, NotedTensor, NotedTensors
from .ownership import records_over
from .slab import Slot
from .slots import Slots

__all__ = ["Booking"]


class Booking:
    """All records of a store, and the saved tensors that have none yet."""

    def __init__(
        self,
        ledger: Ledger[Record],
        noted: NotedTensors,
        lent_views: LentViews,
        slots: Slots,
    ) -> None:
        self.noted = noted
        self._slots = slots
        self._begin_to_pin = slots.slab.begin_to_pin
        self._windows = ledger.windows
        self._records = ledger.records
        self._pending = ledger.pending
        self._counters = ledger.counters
        self._lent_views = lent_views

    def num_live(self) -> int:
        num_booked = sum(record.num_members for record in list(self._records.values()))
        return num_booked + sum(1 for _ in self.noted.living())

    def book_all(self) -> None:
        """Book everything in host memory that is settled. Small tensors become groups: see NOTE [Groups]."""
        if not self.noted.num_bytes:
            return
        by_storage: dict[tuple[int, int], list[NotedTensor]] = {}
        for noted in self.noted.take():
            by_storage.setdefault((noted.log.number, noted.storage_id), []).append(noted)
        grouping = Grouping[Part](self._windows.group_bytes, self._windows.member_bytes)
        for tensors in by_storage.values():
            self._sort_in(tensors, grouping)
        for group in grouping.rest():
            self._book_group(group)
        self.noted.end_round()

    def _sort_in(self, tensors: list[NotedTensor], grouping: Grouping[Part]) -> None:
        """`tensors`: all of one storage that are noted and settled."""
        first = tensors[0]
        log = first.log
        nbytes = log.sizes[first.index]
        is_small = 0 < nbytes <= grouping.largest_bytes and log.gathers
        part = take_if_ours(tensors, nbytes) if is_small else None
        if part is not None:
            key = log.number, part.aliases[0].dtype, log.place_of(first.index)
            group = grouping.add(part, nbytes, key)
            if group is not None:
                self._book_group(group)
        elif is_small and may_join_later(tensors):
            self.noted.put_back(tensors)
        else:
            self._book_each(tensors)

    def _book_each(self, tensors: Iterable[NotedTensor]) -> None:
        for noted in tensors:
            self._book(noted)

    def _book_group(self, group: Group[Part]) -> None:
        slot = self._slot_for(group)
        if slot is None:
            for part in group.parts:
                part.give_back()
                self._book_each(part.tensors)
            return
        with torch.inference_mode(mode=False):  # `stats` may be called inside that mode, whose tensors have no version
            self._book_in_slot(group, slot)

    def _book_in_slot(self, group: Group[Part], slot: Slot) -> None:
        copy_into(slot, group)
        members = [noted for part in group.parts for noted in part.tensors]
        newest, dtype = members[-1], group.parts[0].aliases[0].dtype
        log = newest.log
        handle = log.maker.handle_for_group(self._slots.hand_out(slot), newest.key, dtype, len(members))
        record = handle.record
        record.slot = slot
        log.place_group(record, members)
        self._records[record.key] = record
        self._pending.settle((record,))
        for part in group.parts:
            self._count_joins(part.tensors, part.aliases)
        become_members(group, handle)

    def _slot_for(self, group: Group[Part]) -> Slot | None:
        """None: it is one storage, or the system has no memory. Then each leaves from where it lies."""
        if len(group.parts) == 1:
            return None
        try:
            return self._slots.allocate(group.nbytes)
        except OSError as error:
            if is_interrupt(error):  # a time limit's TimeoutError is an OSError too
                raise
            return None

    def book_tracked(self, of: NotedLog | None = None) -> None:
        """Book what is tracked and settled, of one log or of all: NOTE [Tracked, then booked] in `tracked.py`."""
        for tracked in self.noted.take_tracked(of):
            self._book(tracked)

    def book_one(self, noted: NotedTensor) -> None:
        """Its bytes may be read from now on."""
        self.noted.remove(noted)
        self._book(noted)

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
        handle = log.maker.handle_for(noted)
        record = handle.record
        if record.device is not None:
            self._begin_to_pin(record.device)
        log.place(record, noted.index)
        self._records[record.key] = record
        self._pending.settle((record,))
        log.come_in(noted.index, record)
        self._become(noted, handle, record.layout)

    def _become(self, noted: NotedTensor, handle: Handle, layout: Layout) -> None:
        """Replace the alias. Backward may have been given it: see NOTE [Stolen gradients] in `handing_out.py`."""
        handed_out = () if noted.alias is None else (noted.alias,)
        noted.become(handle, layout)
        self._lent_views.keep(handle.record, handed_out)

    @staticmethod
    def _handle_of_same_bytes(noted: NotedTensor) -> Handle | None:
        alias = noted.alias
        if alias is None:
            return None
        for record, handle in records_over(alias.untyped_storage(), noted.version, noted.log.residency):
            if record.span is None and record.source is not None and record.root is noted.root:
                return handle
        return None

    def _join(self, noted: NotedTensor, handle: Handle) -> None:
        layout = self._count_view(noted)
        handle.record.joined += (layout,)
        noted.log.come_in(noted.index, handle.record)
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
            self._counters.packed_bytes -= noted.log.sizes[noted.index]
            self._counters.deduplicated_bytes += alias.nbytes

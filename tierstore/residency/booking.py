"""Records are made of real tensors: see NOTE [Noted, then booked] in `ledger/noted.py`, and the rules in
`ledger/booking.py`. The caller holds the store's lock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..base.interrupts import is_interrupt
from ..ledger.booking import BookingRules
from ..ledger.books import Books
from ..ledger.groups import DEVICE_ALIGNMENT_BYTES, Group, Grouping
from ..ledger.noted import NotedTensors
from ..ledger.windows import NUM_MEMBERS
from .device import Streams
from .groups import become_members, copy_into, take_if_ours
from .handle import Handle, Record
from .handle_making import HandleFactory
from .layout import layout_of, unseen_by_modes
from .lent import LentViews
from .noted import NotedLog, NotedTensor
from .ownership import CLAIMS_ATTRIBUTE, num_owners, records_over
from .slab import Slot
from .slots import Slots


class Booking(BookingRules[NotedTensor, Record]):
    """All records of a store, and the saved tensors that have none yet."""

    _take_if_ours = staticmethod(take_if_ours)

    def __init__(
        self,
        books: Books[Record],
        handles: HandleFactory,
        noted: NotedTensors[NotedTensor, Record],
        lent_views: LentViews,
        slots: Slots,
        streams: Streams,
    ) -> None:
        super().__init__(books, noted)
        self._handles = handles
        self._streams = streams
        self._slots = slots
        self._begin_to_pin = slots.slab.begin_to_pin
        self._lent_views = lent_views

    def num_live(self) -> int:
        num_booked = sum(record.num_members for record in list(self._records.values()))
        return num_booked + sum(1 for _ in self.noted.living())

    # --- what is tracked ----------------------------------------------------------------------------------------

    @unseen_by_modes
    def book_tracked(self, group_bytes: int, of: NotedLog | None = None) -> None:
        """Book what is tracked and settled, of one log or of all: NOTE [Tracked, then booked] in `ledger/tracked.py`.

        `group_bytes`: the most bytes of a group.
        """
        self._book_sorted(self.noted.take_tracked(of), self._grouping_on_device(group_bytes), may_wait=False)

    @unseen_by_modes
    def book_leaving(self, group_bytes: int, log: NotedLog, *, may_wait: bool) -> None:
        """Book what is tracked, is settled, and waits to leave. `may_wait`: what others hold waits once more."""
        self._book_sorted(self.noted.take_leaving(log), self._grouping_on_device(group_bytes), may_wait=may_wait)
        log.num_sorted = log.num_packs

    @staticmethod
    def _grouping_on_device(group_bytes: int) -> Grouping[NotedTensor]:
        return Grouping(group_bytes, group_bytes // NUM_MEMBERS, DEVICE_ALIGNMENT_BYTES)

    # --- groups -------------------------------------------------------------------------------------------------

    def _book_together(self, group: Group[NotedTensor]) -> bool:
        with torch.inference_mode(mode=False):  # `stats` may be called inside that mode, whose tensors have no version
            return super()._book_together(group)

    def _handle_of_group(self, group: Group[NotedTensor], members: Sequence[NotedTensor]) -> Handle | None:
        newest = members[-1]
        device = newest.device
        slot, memory = self._copied(group) if device is None else (None, self._gathered(group, device))
        if memory is None:
            return None
        handle = self._handles.of_group(newest.log.store, memory, newest.key, group.parts[0].kind, len(members))
        record = handle.record
        record.slot = slot
        if device is not None:
            record.device, record.stream = device, newest.stream
            self._begin_to_pin(device)
        return handle

    def _copied(self, group: Group[NotedTensor]) -> tuple[Slot | None, torch.Tensor | None]:
        try:
            slot = self._slots.allocate(group.nbytes)
        except OSError as error:
            if is_interrupt(error):  # a time limit's TimeoutError is an OSError too
                raise
            return None, None
        copy_into(slot, group)
        return slot, self._slots.hand_out(slot)

    def _gathered(self, group: Group[NotedTensor], device: torch.device) -> torch.Tensor | None:
        storages = [part.aliases[0] for part in group.parts]
        return self._streams.gather(storages, group.first_bytes, device, group.parts[0].tensors[0].stream)

    def _become_members(self, group: Group[NotedTensor], handle: Handle) -> None:
        for part in group.parts:
            if len(part.tensors) > 1:
                self._count_joins(zip(part.tensors, part.aliases, strict=True))
        device = handle.record.device
        become_members(group, handle, None if device is None else self._streams.empty_on(handle.source.device))

    # --- records ------------------------------------------------------------------------------------------------

    @staticmethod
    def may_be_booked(noted: NotedTensor) -> bool:
        alias = noted.alias
        return alias is not None and CLAIMS_ATTRIBUTE in alias.untyped_storage().__dict__

    @staticmethod
    def _handle_of_same_bytes(noted: NotedTensor) -> Handle | None:
        alias = noted.alias
        if alias is None or CLAIMS_ATTRIBUTE not in alias.untyped_storage().__dict__:  # as `may_be_booked`
            return None
        for record, handle in records_over(alias.untyped_storage(), noted.version, noted.log.residency):
            if record.span is None and record.source is not None and record.root is noted.root:
                return handle
        return None

    @staticmethod
    def _are_sole_owners(tensors: Sequence[NotedTensor]) -> bool:
        return num_owners(tensors[0].storage_id) == len(tensors)

    def _handle_of(self, noted: NotedTensor) -> Handle | None:
        if noted.alias is None:
            return None
        handle = self._handles.of_noted(noted)
        record = handle.record
        if record.device is not None:
            self._begin_to_pin(record.device)
        return handle

    def _become(self, noted: NotedTensor, handle: Handle, *, is_view: bool) -> None:
        """Replace the alias. Backward may have been given it: see NOTE [Stolen gradients] in `handing_out.py`."""
        record = handle.record
        noted.layout = record.layout
        if is_view and noted.alias is not None:
            self._count_join(noted, noted.alias)
            noted.layout = layout_of(noted.alias)
            record.joined += (noted.layout,)
        noted.log.come_in((noted.index,), record)
        handed_out = () if noted.alias is None else (noted.alias,)  # the one reference besides backward's
        noted.handle = handle
        noted.alias = None  # last: see NOTE [Noted, then booked]
        self._lent_views.keep(record, handed_out)

    def _count_views(self, tensors: Sequence[NotedTensor]) -> None:
        self._count_joins((noted, noted.alias) for noted in tensors)

    def _count_joins(self, aliases: Iterable[tuple[NotedTensor, torch.Tensor | None]]) -> None:
        seen = set()
        for noted, alias in aliases:
            view_of = id(noted.root), noted.version  # the group keeps the weak references, so no id is used twice
            if view_of in seen and alias is not None:
                self._count_join(noted, alias)
            seen.add(view_of)

    def _count_join(self, noted: NotedTensor, alias: torch.Tensor) -> None:
        if not noted.joined:
            noted.joined = True
            self._counters.packed_bytes -= noted.log.packs[noted.index][1]
            self._counters.deduplicated_bytes += alias.nbytes

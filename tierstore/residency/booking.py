"""From noted to booked: see NOTE [Noted, then booked] in `noted.py`. The caller holds the store's lock."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..rules.ledger import Ledger
from .handle import Handle, Record
from .layout import Layout, layout_of
from .lent import LentViews
from .noted import NotedLog, NotedTensor, NotedTensors
from .ownership import records_over

__all__ = ["Booking"]


class Booking:
    """All records of a store, and the saved tensors that have none yet."""

    def __init__(
        self,
        ledger: Ledger[Record],
        noted: NotedTensors,
        lent_views: LentViews,
        begin_to_pin: Callable[[torch.device], None],
    ) -> None:
        self.noted = noted
        self._begin_to_pin = begin_to_pin
        self._records = ledger.records
        self._pending = ledger.pending
        self._counters = ledger.counters
        self._lent_views = lent_views

    def num_live(self) -> int:
        return len(self._records) + sum(1 for _ in self.noted.living())

    def book_all(self) -> None:
        if self.noted.num_bytes:
            for noted in self.noted.take():
                self._book(noted)

    def book_tracked(self, of: NotedLog | None = None) -> None:
        """Book what is tracked and settled, of one log or of all: NOTE [Tracked, then booked] in `tracked.py`."""
        for tracked in self.noted.take_tracked(of):
            self._book(tracked)

    def book_one(self, noted: NotedTensor) -> None:
        """Its bytes may be read from now on."""
        self.noted.remove(noted)
        self._book(noted)

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
                self._count_joins(group)

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

    def _count_joins(self, group: list[NotedTensor]) -> None:
        seen = set()
        for noted in group:
            view_of = id(noted.root), noted.version  # the group keeps the weak references, so no id is used twice
            if view_of in seen and noted.alias is not None:
                self._count_join(noted, noted.alias)
            seen.add(view_of)

    def _count_join(self, noted: NotedTensor, alias: torch.Tensor) -> None:
        if not noted.joined:
            noted.joined = True
            self._counters.packed_bytes -= noted.log.sizes[noted.index]
            self._counters.deduplicated_bytes += alias.nbytes

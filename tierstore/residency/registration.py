"""Records are made of real tensors: see NOTE [Tracked, then registered] in `ledger/tracked.py`, and the rules in
`ledger/registration.py`. The caller holds the store's lock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..base.interrupts import is_interrupt
from ..ledger.books import Books
from ..ledger.groups import DEVICE_ALIGNMENT_BYTES, Group, Grouping
from ..ledger.registration import RegistrationRules
from ..ledger.tracked import TrackedTensors
from ..ledger.windows import NUM_MEMBERS
from .device import Streams
from .groups import become_members, copy_into, take_if_sole_owner
from .handle import Handle, Record
from .handle_making import HandleFactory
from .layout import layout_of, unseen_by_modes
from .outstanding import OutstandingViews
from .ownership import CLAIMS_ATTRIBUTE, num_owners, records_over
from .slab import Slot
from .slots import Slots
from .tracked import TrackedLog, TrackedTensor


class Registration(RegistrationRules[TrackedTensor, Record]):
    """All records of a store, and the saved tensors that have none yet."""

    _take_if_ours = staticmethod(take_if_sole_owner)

    def __init__(
        self,
        books: Books[Record],
        handles: HandleFactory,
        tracked: TrackedTensors[TrackedTensor, Record],
        outstanding_views: OutstandingViews,
        slots: Slots,
        streams: Streams,
    ) -> None:
        super().__init__(books, tracked)
        self._handles = handles
        self._streams = streams
        self._slots = slots
        self._begin_to_pin = slots.slab.begin_to_pin
        self._outstanding_views = outstanding_views

    def num_live(self) -> int:
        num_registered = sum(record.num_members for record in list(self._records.values()))
        return num_registered + sum(1 for _ in self.tracked.living())

    # --- what is tracked ----------------------------------------------------------------------------------------

    @unseen_by_modes
    def register_on_device(self, group_bytes: int, of: TrackedLog | None = None) -> None:
        """Register what is tracked and settled, of one log or of all: NOTE [Tracked on a device] in
        `ledger/on_device.py`.

        `group_bytes`: the most bytes of a group."""
        self._register_sorted(self.tracked.take_on_device(of), self._grouping_on_device(group_bytes), may_wait=False)

    @unseen_by_modes
    def register_leaving(self, group_bytes: int, log: TrackedLog, *, may_wait: bool) -> None:
        """Register what is tracked, is settled, and waits to leave. `may_wait`: what others hold waits once more."""
        self._register_sorted(self.tracked.take_leaving(log), self._grouping_on_device(group_bytes), may_wait=may_wait)
        log.num_sorted = log.num_packs

    @staticmethod
    def _grouping_on_device(group_bytes: int) -> Grouping[TrackedTensor]:
        return Grouping(group_bytes, group_bytes // NUM_MEMBERS, DEVICE_ALIGNMENT_BYTES)

    # --- groups -------------------------------------------------------------------------------------------------

    def _register_together(self, group: Group[TrackedTensor]) -> bool:
        with torch.inference_mode(mode=False):  # `stats` may be called inside that mode, whose tensors have no version
            return super()._register_together(group)

    def _handle_of_group(self, group: Group[TrackedTensor], members: Sequence[TrackedTensor]) -> Handle | None:
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

    def _copied(self, group: Group[TrackedTensor]) -> tuple[Slot | None, torch.Tensor | None]:
        try:
            slot = self._slots.allocate(group.nbytes)
        except OSError as error:
            if is_interrupt(error):  # a time limit's TimeoutError is an OSError too
                raise
            return None, None
        copy_into(slot, group)
        return slot, self._slots.hand_out(slot)

    def _gathered(self, group: Group[TrackedTensor], device: torch.device) -> torch.Tensor | None:
        storages = [part.aliases[0] for part in group.parts]
        return self._streams.gather(storages, group.first_bytes, device, group.parts[0].tensors[0].stream)

    def _become_members(self, group: Group[TrackedTensor], handle: Handle) -> None:
        for part in group.parts:
            if len(part.tensors) > 1:
                self._count_joins(zip(part.tensors, part.aliases, strict=True))
        device = handle.record.device
        become_members(group, handle, None if device is None else self._streams.empty_on(handle.source.device))

    # --- records ------------------------------------------------------------------------------------------------

    @staticmethod
    def may_be_registered(tracked: TrackedTensor) -> bool:
        alias = tracked.alias
        return alias is not None and CLAIMS_ATTRIBUTE in alias.untyped_storage().__dict__

    @staticmethod
    def _handle_of_same_bytes(tracked: TrackedTensor) -> Handle | None:
        alias = tracked.alias
        if alias is None or CLAIMS_ATTRIBUTE not in alias.untyped_storage().__dict__:  # as `may_be_registered`
            return None
        for record, handle in records_over(alias.untyped_storage(), tracked.version, tracked.log.residency):
            if record.span is None and record.source is not None and record.root is tracked.root:
                return handle
        return None

    @staticmethod
    def _are_sole_owners(tensors: Sequence[TrackedTensor]) -> bool:
        return num_owners(tensors[0].storage_id) == len(tensors)

    def _handle_of(self, tracked: TrackedTensor) -> Handle | None:
        if tracked.alias is None:
            return None
        handle = self._handles.of_tracked(tracked)
        record = handle.record
        if record.device is not None:
            self._begin_to_pin(record.device)
        return handle

    def _become(self, tracked: TrackedTensor, handle: Handle, *, is_view: bool) -> None:
        """Replace the alias. Backward may have been given it: see NOTE [Stolen gradients] in `handing_out.py`."""
        record = handle.record
        tracked.layout = record.layout
        if is_view and tracked.alias is not None:
            self._count_join(tracked, tracked.alias)
            tracked.layout = layout_of(tracked.alias)
            record.joined += (tracked.layout,)
        tracked.log.come_in((tracked.index,), record)
        handed_out = () if tracked.alias is None else (tracked.alias,)  # the one reference besides backward's
        tracked.handle = handle
        tracked.alias = None  # last: see NOTE [Tracked, then registered]
        self._outstanding_views.keep(record, handed_out)

    def _count_views(self, tensors: Sequence[TrackedTensor]) -> None:
        self._count_joins((tracked, tracked.alias) for tracked in tensors)

    def _count_joins(self, aliases: Iterable[tuple[TrackedTensor, torch.Tensor | None]]) -> None:
        seen = set()
        for tracked, alias in aliases:
            view_of = id(tracked.root), tracked.version  # the group keeps the weak references, so no id is used twice
            if view_of in seen and alias is not None:
                self._count_join(tracked, alias)
            seen.add(view_of)

    def _count_join(self, tracked: TrackedTensor, alias: torch.Tensor) -> None:
        if not tracked.joined:
            tracked.joined = True
            self._counters.packed_bytes -= tracked.log.packs[tracked.index][1]
            self._counters.deduplicated_bytes += alias.nbytes

"""Records are made of real tensors: see NOTE [Tracked, then registered] in `ledger/tracked.py`, and the rules in
`ledger/registration.py`. `HandleFactory` makes them, and their handles. The caller holds the store's lock."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache

import torch

from ..base.interrupts import is_interrupt
from ..disk.tier import Kind
from ..ledger.books import Books
from ..ledger.groups import Group, Grouping
from ..ledger.registration import RegistrationRules
from ..ledger.tracked import TrackedTensors
from ..tensors.layout import Layout, alias_of, in_dtype, layout_of
from ..tensors.slab import Slot
from ..tensors.slots import Slots
from ..tensors.torch_names import storage_address, storage_use_count
from .device import Streams, bytes_of
from .groups import become_members, copy_into, take_if_sole_owner
from .handle import Handle, Record, StoriedRecord
from .outstanding import OutstandingViews
from .ownership import CLAIMS_ATTRIBUTE, claim, is_claimed, records_over
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
        self.handles = handles
        self._streams = streams
        self._slots = slots
        self._begin_to_pin = slots.slab.begin_to_pin
        self._outstanding_views = outstanding_views

    def num_live(self) -> int:
        num_registered = sum(record.num_members for record in list(self._records.values()))
        return num_registered + sum(1 for _ in self.tracked.living())

    # --- what is tracked ----------------------------------------------------------------------------------------

    def register_on_device(self, grouping: Grouping[TrackedTensor], of: TrackedLog | None = None) -> None:
        """Register what is tracked and settled, of one log or of all: NOTE [Tracked on a device] in
        `ledger/on_device.py`."""
        self._register_sorted(self.tracked.take_on_device(of), grouping, may_wait=False)

    def register_leaving(self, grouping: Grouping[TrackedTensor], log: TrackedLog, *, may_wait: bool) -> None:
        """Register what is tracked, is settled, and waits to leave. `may_wait`: what others hold waits once more."""
        self._register_sorted(self.tracked.take_leaving(log), grouping, may_wait=may_wait)
        log.num_sorted = log.num_packs

    # --- groups -------------------------------------------------------------------------------------------------

    def _handle_of_group(self, group: Group[TrackedTensor]) -> Handle | None:
        newest, kind, num_members = group.tensors[-1], group.aliases[0].dtype, len(group.tensors)
        store, key, device = newest.log.store, newest.key, newest.device
        slot: Slot | None = None
        if device is not None and group.is_batch:
            parts = dict(zip(group.first_bytes, bytes_of(group.aliases), strict=True))
            handle = self.handles.of_batch(store, parts, self._streams.empty_on(device), key, kind, num_members)
        else:
            slot, memory = self._copied(group) if device is None else (None, self._gathered(group, device))
            if memory is None:
                return None
            handle = self.handles.of_group(store, memory, key, kind, num_members)
        record = handle.record
        record.slot = slot
        if device is not None:
            record.device, record.stream = device, newest.stream
            self._begin_to_pin(device)
        return handle

    def _copied(self, group: Group[TrackedTensor]) -> tuple[Slot | None, torch.Tensor | None]:
        try:
            slot = self._slots.slab.allocate(group.nbytes)
        except OSError as error:
            if is_interrupt(error):  # a time limit's TimeoutError is an OSError too
                raise
            return None, None
        copy_into(slot, group)
        return slot, self._slots.hand_out(slot)

    def _gathered(self, group: Group[TrackedTensor], device: torch.device) -> torch.Tensor | None:
        storages = dict(zip(group.first_bytes, group.aliases, strict=True))
        return self._streams.gather(storages, device, group.tensors[0].stream)

    def _become_members(self, group: Group[TrackedTensor], handle: Handle) -> None:
        if len(set(group.first_bytes)) < len(group.tensors):
            self._count_joins(zip(group.tensors, group.aliases, strict=True))
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
    def _num_owners(by_storage: Mapping[int, Sequence[TrackedTensor]]) -> Iterable[int]:
        return [num_uses - 1 for num_uses in map(storage_use_count, by_storage)]  # as `num_owners`, without its call

    def _handle_of(self, tracked: TrackedTensor) -> Handle | None:
        if tracked.alias is None:
            return None
        handle = self.handles.of_tracked(tracked)
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
        self._count_joins([(tracked, tracked.alias) for tracked in tensors])

    def _stay_tracked(self, tensors: Sequence[TrackedTensor], num_owners: int) -> bool:
        """On an accelerator, as long as nothing of their graph has to leave: NOTE [Held elsewhere] in
        `ledger/on_device.py`."""
        newest = tensors[-1]
        log, alias = newest.log, newest.alias
        if newest.device is None or alias is None or log.plan is not None or log.leaving or not log.tracks_on_device:
            return False
        if is_claimed(alias.untyped_storage()):
            return False
        first = log.find_over(newest.storage_id)
        self._count_views(tensors if first is None or first in tensors else (first, *tensors))
        if num_owners > self.tracked.num_over(newest.storage_id):
            self.tracked.on_device.give_back(log, newest.index)
        return True

    def charge_what_is_ours(self, log: TrackedLog) -> None:
        """Charge again for what others held at the last look, and hold no longer."""
        for storage_id in list(log.held_elsewhere):
            tracked = log.find_over(storage_id)
            alias = None if tracked is None else tracked.alias  # keeps the storage alive meanwhile
            if alias is not None and storage_use_count(storage_id) - 1 <= self.tracked.num_over(storage_id):
                self.tracked.on_device.charge(log, storage_id)

    def _count_joins(self, aliases: Iterable[tuple[TrackedTensor, torch.Tensor | None]]) -> None:
        seen, counters = set(), self._counters
        for tracked, alias in aliases:
            view_of = id(tracked.root), tracked.version  # the group keeps the weak references, so no id is used twice
            if view_of not in seen:
                seen.add(view_of)
            elif alias is not None and not tracked.joined:  # as `_count_join`, without its call: there may be many
                tracked.joined = True
                counters.packed_bytes -= tracked.log.packs[tracked.index][1]
                counters.deduplicated_bytes += alias.nbytes

    def _count_join(self, tracked: TrackedTensor, alias: torch.Tensor) -> None:
        if not tracked.joined:
            tracked.joined = True
            self._counters.packed_bytes -= tracked.log.packs[tracked.index][1]
            self._counters.deduplicated_bytes += alias.nbytes


class HandleFactory:
    """Makes the handles of one store. Any thread, outside of its modes.

    A record that was just made is not in the books yet. `note_release` takes a record whose handle has died."""

    def __init__(
        self,
        residency: object,
        note_release: Callable[[Record], None],
        keys: Iterator[int],
        *,
        keep_stories: bool = False,
    ) -> None:
        self.keys = keys
        self._new_record = StoriedRecord if keep_stories else Record
        self._residency = residency
        self._note_release = note_release

    def new(
        self,
        owner: object,
        tensor: torch.Tensor,
        layout: Layout,
        device: torch.device | None = None,
        root: weakref.ref[torch.Tensor] | None = None,
    ) -> Handle:
        """A handle for a strided tensor, which keeps its `owner` open.

        `device`: the accelerator that it lives on. `root`: the tensor's base, or itself; None: no other tensor will
        share the record."""
        storage = tensor.untyped_storage()
        source = alias_of(tensor, layout)
        nbytes = storage.nbytes() if tensor.numel() else 0
        handle = Handle(owner, source)
        key, address, layout = next(self.keys), storage_address(source), _same_layout(layout)
        handle.record = record = self._new_record(
            handle, self._note_release, key, nbytes, address, layout, _kind_of(layout.dtype)
        )
        record.root = root
        record.residency = self._residency
        record.device = device
        claim(record, storage)
        return handle

    def of_tracked(self, tracked: TrackedTensor) -> Handle:
        alias = tracked.alias
        if alias is None:
            raise RuntimeError(f"tensor {tracked.key} is registered already")
        layout = _same_layout(layout_of(alias))
        kind, nbytes = _kind_of(layout.dtype), tracked.log.packs[tracked.index][1]
        handle = Handle(tracked.log.store, alias_of(alias, layout))
        handle.record = record = self._new_record(
            handle, self._note_release, tracked.key, nbytes, tracked.address, layout, kind
        )
        record.version = tracked.version
        record.device, record.stream = tracked.device, tracked.stream
        record.root = tracked.root
        record.residency = self._residency
        claim(record, alias.untyped_storage())
        return handle

    def of_group(self, owner: object, memory: torch.Tensor, key: int, dtype: torch.dtype, num_members: int) -> Handle:
        """`memory`: uint8, shape [n], over a slot that is the record's from now on; of members of that dtype."""
        handle = self._of_members(owner, memory, len(memory), key, dtype, num_members)
        claim(handle.record, memory.untyped_storage())
        return handle

    def of_batch(
        self,
        owner: object,
        parts: dict[int, torch.Tensor],
        empty: torch.Tensor,
        key: int,
        dtype: torch.dtype,
        num_members: int,
    ) -> Handle:
        """`parts`: as `Handle.parts`, in order. `empty`: a tensor without bytes on the same device."""
        ranges = tuple([(first_byte, first_byte + part.nbytes) for first_byte, part in parts.items()])
        handle = self._of_members(owner, empty, ranges[-1][1], key, dtype, num_members)
        handle.parts, handle.record.ranges, handle.record.claims = parts, ranges, []
        return handle

    def _of_members(
        self, owner: object, memory: torch.Tensor, nbytes: int, key: int, dtype: torch.dtype, num_members: int
    ) -> Handle:
        source, address = in_dtype(memory, dtype), memory.data_ptr()
        handle, layout = Handle(owner, source), _same_layout(layout_of(source))
        handle.record = record = self._new_record(
            handle, self._note_release, key, nbytes, address, layout, _kind_of(dtype)
        )
        record.residency = self._residency
        record.num_members = num_members
        record.span = 0, nbytes
        return handle


@lru_cache(4096)
def _same_layout(layout: Layout) -> Layout:
    """An equal layout, to be shared: tensors have few geometries, and each layout is three objects."""
    return layout


@cache
def _kind_of(dtype: torch.dtype) -> Kind:
    return Kind(str(dtype).removeprefix("torch."), dtype.itemsize)

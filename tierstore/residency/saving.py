"""Tensors are saved: tracked, tracked or stored, and their bytes leave memory where it is short.

Each public method takes the lock of the store (`guard.py`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ..base.ctrl_c import CTRL_C
from ..ledger.books import NUM_SCANNED_PER_PACK
from ..ledger.counters import STALL_CAUSES
from ..ledger.grants import SHARE_GRANTED, Grant
from ..ledger.ledger import Ledger
from ..ledger.on_device import UnseenGraph
from ..ledger.state import State
from ..tensors.layout import Layout, layout_of, memory_at, unseen_by_modes
from ..tensors.slots import Slots
from .device import DeviceTier
from .guard import Guard, change, change_if_open, is_inside_any, whole
from .handle import Handle, Record
from .ownership import claims_of
from .registration import Registration
from .tracked import TrackedLog, TrackedTensor
from .transfers import Worker

_PACK_WAITS = STALL_CAUSES[0]


class Saving:
    """Takes in what the hooks, and `TierStore.put`, give it.

    Attributes:
        fits_on_device: whether so many bytes more may stay on devices. Without the lock, it may be out of date.
    """

    def __init__(
        self,
        guard: Guard,
        ledger: Ledger[Record],
        registration: Registration,
        slots: Slots,
        devices: DeviceTier,
        worker: Worker,
    ) -> None:
        self._guard = guard
        self._ledger = ledger
        self._books = ledger.books
        self._down = ledger.down
        self._windows = ledger.books.windows
        self._counters = ledger.books.counters
        self._registration = registration
        self._handles = registration.handles
        self._tracked = registration.tracked
        self._slots = slots
        self._devices = devices
        self._streams = devices.streams
        self._worker = worker
        self.fits_on_device = devices.window.fits

    @whole
    def track_on_host(self, tracked: TrackedTensor, node: int, nbytes: int) -> None:
        """Track a tensor in host memory that autograd node `node` saved; its storage has `nbytes` bytes.

        Its bytes are not read before a later node saves something, or its log is settled. Waits while the budget is
        full. Raises what `save` does."""
        guard, down, log = self._guard, self._down, tracked.log
        guard.must_be_open()
        tracked.key = next(self._tracked.keys)
        log.newest_node = node
        new_bytes = 0 if (tracked.storage_id, nbytes) in log.num_tracked else nbytes
        is_short, uses_staging, may_wait, room_bytes = down.room_for(new_bytes)
        is_planned = log.plan is not None and not may_wait
        is_short |= is_planned
        if is_short and (self._books.must_act() or not self._registration.is_registered(tracked)):
            self._reclaim(is_planned=is_planned)
            is_short_still, uses_staging, _, _ = down.room_for(new_bytes)
            if (is_short_still or is_planned) and nbytes > self._windows.large_bytes:
                log.registers_large = True
        guard.is_changing = True
        counters = self._counters
        counters.packed_tensors += 1
        counters.packed_bytes += nbytes
        new_bytes = self._tracked.add(tracked, node, nbytes)
        if uses_staging:
            down.charge_tracked(new_bytes)
        if is_short:
            if self._registration.may_be_registered(tracked):
                self._registration.join_if_registered(tracked)
            self._slots.trim()
        elif tracked.index and room_bytes >= SHARE_GRANTED * nbytes and log.plan is None and log.may_be_granted():
            self._tracked.grant(log, Grant(room_bytes // SHARE_GRANTED))

    def track_on_device(
        self, tracked: TrackedTensor, node: int, nbytes: int, device: torch.device, *, leaves: bool
    ) -> None:
        """Track one on an accelerator that has room: see NOTE [Tracked on a device] in `ledger/on_device.py`.

        `leaves`: it has not, and waits for enough others to leave with them."""
        guard = self._guard
        if guard.is_mine() or (guard.may_be_inside and is_inside_any()):  # as `lock` does
            guard.refuse_handler()
        with guard.mutex:
            try:
                if guard.closed is not None or guard.is_changing:
                    guard.must_be_open()
                ledger, books, log = self._ledger, self._books, tracked.log
                tracked.key = next(self._tracked.keys)
                log.newest_node = node
                device_rules = ledger.device
                must_act: object = books.pending.must_be_scanned or books.blocked or books.spill_error is not None
                if not must_act and (device_rules.flights or device_rules.busy):
                    must_act = device_rules.has_finished()
                is_full = leaves and ledger.leaves_now(log, nbytes)
                if is_full or must_act:
                    CTRL_C.hold()
                    self._act(log if is_full else None)
                guard.is_changing = True
                tracked.device, tracked.stream = device, self._streams.note_current(device)
                counters = self._counters
                counters.packed_tensors += 1
                counters.packed_bytes += nbytes
                self._tracked.add(tracked, node, nbytes)
                if leaves:
                    log.let_leave(tracked.index)
                if tracked.index and log.may_be_granted() and not books.must_act():
                    ledger.grant_on_device(log, tracked, nbytes, leaves=leaves)
                if device_rules.flights:
                    device_rules.bound_flight()
                guard.is_changing = False
                if guard.jobs.has_news or guard.jobs.has_progress:
                    guard.tell()
            except BaseException as error:  # as in `whole`, but without its extra call: many packs pass here
                guard.judge(error)
                raise
            finally:
                if CTRL_C.is_held:
                    CTRL_C.let_through()

    @change
    def find_room_to_track(self, log: TrackedLog, node: int, nbytes: int) -> bool:
        """Node `node` will save a tensor. If neither dead ones nor those that are to leave anyway give it room, the log
        tracks no more. Does not wait."""
        if self._devices.window.fits(nbytes):
            return True
        log.newest_node = node
        if log.leaving:
            self._registration.register_leaving(self._ledger.device_grouping(), log, may_wait=True)
        if not self._devices.window.fits(nbytes):
            log.tracks_on_device = False
            self._registration.register_on_device(self._ledger.device_grouping())
        return log.tracks_on_device

    @change
    def save(
        self,
        tensor: torch.Tensor,
        layout: Layout,
        root: weakref.ref[torch.Tensor] | None,
        device: torch.device | None,
        log: TrackedLog,
        node: int,
        fresh: list[Record],
    ) -> tuple[Handle, int]:
        """Make the record of a tensor that autograd node `node` saved, as the next of the log; returns its handle, and
        its index there.

        Its bytes are not read before it is settled. `fresh`: earlier records, whose bytes may be read from now on; the
        list is left empty. One call for all that a pack changes, since each takes some microseconds. Waits while the
        budget is full. The other arguments are those of `HandleFactory.new`.

        Raises:
            StoreFullError: host budget and disk are full; everything is where it was.
            StorageIOError: an earlier write failed; its bytes, and all others, are in memory.
            StoreClosedError: the store is closed.
        """
        self._begin_pack(log, node, fresh)
        handle = self._handles.new(log.store, tensor, layout, device, root)
        record = handle.record
        self._take_in(record)
        try:
            self._down.reclaim(NUM_SCANNED_PER_PACK)  # as `_reclaim`, without its call; `change` has drained
            if self._books.blocked or self._books.spill_error is not None:
                self._guard.make_room()
        except BaseException:
            self._withdraw(record)
            raise
        if not log.num_packs:
            self._tracked.drop_ended()  # orders learned from earlier logs are needed for this one
        return handle, log.append_registered(record, node)

    @change
    def share(self, record: Record, log: TrackedLog, node: int, fresh: list[Record]) -> int:
        """Like `save`, for a tensor that shares a record: see `join` and `rejoin`. Does not wait."""
        self._begin_pack(log, node, fresh)
        if not log.num_packs:
            self._tracked.drop_ended()
        return log.append_registered(record, node)

    @change
    def store(self, owner: object, tensor: torch.Tensor, device: torch.device | None) -> Handle:
        """Like `save`, but without a log: the tensor is stored even if others hold its storage, and from now on.
        `owner`: what the handle keeps open."""
        if self._books.windows.tracked_bytes:
            self._down.scan_pending(0)
        handle = self._handles.new(owner, tensor, layout_of(tensor), device)
        record = handle.record
        self._take_in(record)
        record.forced = True
        if record.nbytes:
            self._down.admit(record)
            self._slots.trim()
            try:
                self._guard.make_room()
            except BaseException:
                self._withdraw(record)
                raise
        return handle

    @change_if_open
    def settle(self, records: Iterable[Record] = ()) -> None:
        """Allow the records' bytes to be read from now on, and count what was kept. Does not wait."""
        self._books.newly_kept.move_to(self._counters.kept_bytes)
        self._books.pending.settle(records)
        self._slots.trim()

    @change_if_open
    def scan_owners(self, log: TrackedLog) -> None:
        """At the end of a scope or a forward, find out which storages others also hold. Does not wait.

        Tracked tensors whose storage others also hold are registered. Pending records are scanned again if room is
        short."""
        self._devices.poll()
        if log.on_device:
            self._scan_on_device(log)
        self._down.reclaim(None)
        self._registration.scan_owners(log)
        self._books.pending.scan_owners()

    @whole
    def leave_unseen(self, graph: UnseenGraph, num_packs: int, nbytes: int, room_bytes: int | None) -> bool:
        """Autograd keeps so much of a graph by itself, or will: charge it to the graph, and count it with what was
        kept. Does not wait.

        False: there is no room for `room_bytes`, if that was asked for, or the store is closed. Nothing is charged."""
        self._guard.drain()
        if self._guard.closed is not None or not (room_bytes is None or self.fits_on_device(room_bytes)):
            return False
        self._guard.is_changing = True
        counters = self._counters
        counters.packed_tensors += num_packs
        counters.packed_bytes += nbytes
        self._tracked.charge_unseen(graph, nbytes)
        self._ledger.device.bound_flight()
        self._books.newly_kept.move_to(counters.kept_bytes)
        return True

    @change
    def register(self, tracked: TrackedTensor) -> None:
        """Register a tensor whose handle is needed; its bytes may be read from now on. Does not wait."""
        if tracked.handle is None:
            self._registration.register_one(tracked)

    @change
    def register_over(self, storage_id: int) -> None:
        """Register all that is tracked over a living storage: from now on one tensor is handed out for all that saved
        the same. Does not wait."""
        self._registration.register_over(storage_id)

    @whole
    def join(self, record: Record, layout: Layout, nbytes: int) -> bool:
        """Let one more view share the record. Does not wait.

        False: it may not, because the bytes were read already, the handle is gone, or the store is closed."""
        if record.span is not None or record.source is None or self._guard.closed is not None:
            return False
        self._guard.is_changing = True
        record.joined += (layout,)
        self._count_join(nbytes)
        return True

    @unseen_by_modes
    def rejoin(self, record: Record, tensor: torch.Tensor, layout: Layout) -> Layout | None:
        """Let a tensor over restored bytes, which is saved again, share the record that they were restored from.

        Returns the tensor's layout over the storage of that record. None: the bytes may not be the record's any more
        (they could have been changed through another version counter). Computes a checksum, but does not wait."""
        storage = tensor.untyped_storage()
        with self._guard.lock:
            if record.state is not State.CLEAN or record.device is not None or record.claims is not claims_of(storage):
                return None
            memory = memory_at(record.address, record.nbytes)  # the caller's tensor keeps it alive
        if not self._worker.confirms(record.key, memory):
            return None
        self._count_rejoined(tensor.numel() * layout.dtype.itemsize)
        return layout._replace(offset=layout.offset + record.first_byte // layout.dtype.itemsize)

    @change
    def flush(self) -> None:
        """Wait until all writes that were decided on are done.

        Raises:
            StoreFullError, StorageIOError: a write failed; the bytes are in memory.
            StoreClosedError: the store is closed.
        """
        self._devices.poll()
        self._books.disk_is_full = False  # others may have freed something
        self._down.scan_pending()
        self._slots.trim()
        self._guard.make_room()
        while True:
            self._guard.is_changing = False
            while self._guard.jobs.num_writes or self._guard.jobs.num_discards or self._ledger.has_doomed:
                self._guard.wait(_PACK_WAITS)
            self._guard.raise_spill_error()
            if not self._down.unwritten_bytes:
                return
            if self._books.disk_is_full:
                raise self._ledger.full_error(self._down.unwritten_bytes) from self._books.disk_error
            self._guard.is_changing = True
            self._down.retry_unwritten()

    @whole
    def _count_rejoined(self, nbytes: int) -> None:
        self._guard.is_changing = True
        self._count_join(nbytes)

    @whole
    def catch_up(self, log: TrackedLog) -> None:
        """Enter what the log's thread, which calls this, has packed without the lock. Does not wait."""
        self._guard.is_changing = True
        if log.remains in self._tracked.grants:
            self._books.end_grants(log.remains)
        log.is_behind = False

    @change
    def index_of(self, tracked: TrackedTensor) -> int:
        """Its index in its log; NOT_ENTERED: it was packed without the lock just after its grant was ended.

        Does not wait."""
        return tracked.index

    # --- under the lock --------------------------------------------------------------------------------------------

    def _scan_on_device(self, log: TrackedLog) -> None:
        if log.held_elsewhere:
            self._registration.charge_what_is_ours(log)
            self._ledger.device.bound_flight()
        grouping = self._ledger.device_grouping()
        if not (log.tracks_on_device and self._devices.window.fits(0)):
            self._registration.register_on_device(grouping, log)
        elif log.leaving:
            self._registration.register_leaving(grouping, log, may_wait=False)

    def _begin_pack(self, log: TrackedLog, node: int, fresh: list[Record]) -> None:
        log.newest_node = node
        if log.leaving_bytes and self._ledger.leaves_now(log, 0):
            self._registration.register_leaving(self._ledger.device_grouping(), log, may_wait=True)
        self._books.pending.settle(fresh)
        fresh.clear()

    def _take_in(self, record: Record) -> None:
        self._books.records[record.key] = record
        self._counters.packed_tensors += 1
        self._counters.packed_bytes += record.nbytes
        if record.device is not None:
            self._slots.slab.begin_to_pin(record.device)
            record.stream = self._streams.note_current(record.device)

    def _count_join(self, nbytes: int) -> None:
        self._counters.packed_tensors += 1
        self._counters.deduplicated_bytes += nbytes

    @unseen_by_modes
    def _act(self, full: TrackedLog | None) -> None:
        """Before a tensor on an accelerator is tracked. `full`: its log, where what waits there is to leave."""
        if full is not None:
            self._guard.is_changing = True
            self._registration.register_leaving(self._ledger.device_grouping(), full, may_wait=True)
            self._guard.is_changing = False
        self._reclaim()

    def _reclaim(self, *, is_planned: bool = False) -> None:
        self._guard.drain()
        self._guard.is_changing = True
        self._down.reclaim(NUM_SCANNED_PER_PACK, is_planned=is_planned)
        if self._books.blocked or self._books.spill_error is not None:
            self._guard.make_room()

    def _withdraw(self, record: Record) -> None:
        was_changing, self._guard.is_changing = self._guard.is_changing, True
        self._ledger.withdraw(record)
        self._ledger.advance()
        self._guard.is_changing = was_changing

"""One entry of `tiered_offload`: it packs what autograd saves.

What is not worth storing stays where it is, as a `KeptTensor` or a `Kept` (`select.py`). Otherwise a `SavedTensor`
(`saved.py`) goes into the graph. At first the tensor is only *tracked* (`Saving.track_on_host`), which costs least; on
an accelerator likewise (`Saving.track_on_device`). If it has to leave the accelerator soon, if it is large and host
memory was found short, or if it lies over restored bytes, it gets its record at once (`OffloadScope._register`): the
last may share a record that there is.

NOTE [Not before the kernel]
Autograd saves some tensors *before* the kernel that fills them has run (the noise of `rrelu`), and it saves every
output while others still hold it. So nothing may read what the newest node has saved, nor conclude anything from who
holds it. That becomes *settled*, that is, free to be read and to be looked at for other owners, once a node with a
higher number saves something, or the scope ends.

NOTE [Views of one storage]
That two saved tensors share a storage and show the same version does not prove that the same bytes were saved: one
storage can be written through several version counters (the parts of `unsafe_chunk`, `.data`, a numpy workspace). So a
saved tensor joins an earlier record only if three things hold: both are views of the same living tensor, which means
one counter; both have the same version; and none of the record's bytes has been read yet.

Double backward and reentrant checkpointing save again what was restored. Autograd gives it to its functions as new
tensors, and nothing shows that they share a counter with the record's. Such a tensor joins only if a checksum confirms
that the bytes in memory are those on disk. Its own counter is then kept beside the record's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import Parameter

from tierstore.ledger.on_device import DeviceReference
from tierstore.residency.handle import Handle, Record
from tierstore.residency.ownership import CLAIMS_ATTRIBUTE, is_claimed, records_over
from tierstore.residency.residency import Residency
from tierstore.residency.tracked import NOT_ENTERED
from tierstore.store.tier_store import TierStore
from tierstore.tensors.capture import is_capturing
from tierstore.tensors.layout import ACCELERATORS, Layout, detached, is_foreign, layout_of
from tierstore.tensors.torch_names import is_function_mode_on, num_dispatch_modes, sequence_nr, storage_address
from tierstore.tensors.uncompiled import uncompiled

from .advice import warn_if_replayed
from .below import HOOKS_ARE_CALLED_BELOW, HeldTensor, is_below_autograd
from .hooks_off import HooksOff, may_be_of_a_whole_graph
from .order import LogOptions, PackLog, current_log, open_log
from .saved import RejoinedTensor, SavedTensor
from .select import Kept, KeptTensor, SmallLimits, attributes_of, bytes_of, keep

Select = Callable[[torch.Tensor], bool]
_MOST_UNCOUNTED = 4096
"""Tensors that stay before their bytes are counted: a scope may be around a whole training."""


class OffloadScope:
    """One entry of `tiered_offload`. Only the thread that has entered calls it.

    Attributes:
        tracks_on_device: whether tensors on accelerators may be tracked. `takes_grants`: whether packs may do without
            the lock.
        hooks_off: whether its hooks are off the thread; None: they stay on.
    """

    def __init__(
        self,
        store: TierStore,
        limits: SmallLimits,
        select: Select | None,
        options: LogOptions,
        *,
        may_be_off: bool = False,
    ) -> None:
        """`may_be_off`: its hooks will be on the thread, and it may take them off."""
        self._store = store
        self._min_bytes, self._least_bytes, self._most_small_bytes = limits
        self._select = select
        self._options = options
        self._log: PackLog  # not there as long as a graph is expected
        self._expecting: HooksOff | None = None
        self._unsettled_logs: list[PackLog] = []  # earlier ones
        self._fresh: list[Record] = []  # registered, saved by the newest node: see NOTE [Not before the kernel]
        self._fresh_node = -1
        self.tracks_on_device = True
        self.takes_grants = True
        self._residency = residency = store._core.residency
        self._saving = saving = residency.saving
        self._track_on_host = saving.track_on_host  # bound once, like those that follow: each pack needs them
        self._track_on_device = saving.track_on_device
        self._fits_on_device = saving.fits_on_device
        self._may_gather = residency.ledger.may_gather
        self._windows = residency.books.windows
        self._device_of = residency.device_of
        self._current_stream = residency.current_stream
        self._note_death = residency.books.tracked.on_device.note_death
        self._cpu_is_host = residency.cpu_is_host
        self._newly_kept = residency.books.newly_kept
        self._count_parameter = self._newly_kept.adder("parameter")
        self._count_small = self._newly_kept.adder("small")
        self._num_uncounted = 0
        self.hooks_off: HooksOff | None = None
        log = current_log(store, options)
        if may_be_off and select is None and options.device_bytes != 0 and may_be_of_a_whole_graph(store, log):
            self.hooks_off = HooksOff(store, options)
            if log is None and self.hooks_off.expects():
                self._expecting = self.hooks_off
        if self._expecting is None:
            self._log = open_log(store, options)
            if self.hooks_off is not None:
                self.hooks_off.log = self._log

    @uncompiled
    def pack(self, tensor: torch.Tensor, *, is_selected: bool = False) -> SavedTensor | KeptTensor | Kept | HeldTensor:
        """Called by autograd for each tensor that it saves: gives what the graph is to hold in its place.

        Waits while the budget is full. Raises what `Saving.track_on_host` raises; the tensor is then still
        autograd's. `is_selected`: `select` was asked of it already, and wants it."""
        if HOOKS_ARE_CALLED_BELOW and not tensor.requires_grad and is_below_autograd():
            return HeldTensor(self.pack, tensor)
        kind = type(tensor)
        if kind is not torch.Tensor and kind is not Parameter:
            return self.keep(tensor, "unsupported")
        base, count = tensor._base, None
        root = tensor if base is None else base
        kind_of_root = type(root)
        if (
            kind_of_root is Parameter
            or (root.requires_grad and root.is_leaf)
            or (kind_of_root is not torch.Tensor and isinstance(root, Parameter))
        ):  # as `stays_alive`, without its call
            if tensor.layout is not torch.strided:
                return self.keep(tensor, "parameter")
            count = self._count_parameter
        else:
            try:
                version, storage = tensor._version, tensor.untyped_storage()
                nbytes = storage.nbytes()
            except RuntimeError:
                return self.keep(tensor, "unsupported")
            if nbytes < self._min_bytes and (nbytes < self._least_bytes or self._stays_as_small(nbytes)):
                count = self._count_small
        if count is not None:  # half of what a decoder saves; as `keep`, without its calls
            count(tensor.nbytes)
            self._num_uncounted += 1
            if self._num_uncounted >= _MOST_UNCOUNTED:
                self._count_kept()
            if not tensor.requires_grad:
                return keep(tensor)
            if not tensor.is_leaf:
                is_seen = is_function_mode_on() or num_dispatch_modes()
                tensor = detached(tensor) if is_seen else tensor.detach()
            return KeptTensor((tensor, tensor._version))
        is_on_cpu = tensor.is_cpu
        if tensor.is_nested or tensor.is_quantized or not (is_on_cpu or tensor.device.type in ACCELERATORS):
            return self.keep(tensor, "unsupported")  # as `storage_of`, without its calls
        address = storage_address(tensor)
        if nbytes and not address:
            return self.keep(tensor, "unsupported")
        if not tensor.nbytes:
            return self.keep(tensor, "small")
        is_plain = storage.resizable() and not (is_on_cpu and storage.is_shared())  # as `is_foreign` asks
        device = (None if is_on_cpu else tensor.device) if self._cpu_is_host else self._device_of(tensor)
        if not is_plain and is_foreign(storage):
            if device is not None:
                warn_if_replayed(self._store._core.use)
            return self.keep(tensor, "alive elsewhere")
        stream = None if device is None else self._current_stream(device)
        if (
            device is not None
            and device.type == "cuda"
            and getattr(stream, "stream_id", None) != 0  # as `is_capturing` asks first, of another object of the stream
            and is_capturing(device)
        ):
            return self.keep(tensor, "unsupported")
        if not tensor.requires_grad and attributes_of(tensor) is not None:  # NOTE [The same object] in saved.py
            return self.keep(tensor, "unsupported")
        if self._select is not None and not (is_selected or self._select(tensor)):
            return self.keep(tensor, "selected out")
        node = sequence_nr()
        if self._expecting is not None:
            held = self._expecting.keep(tensor, storage, node, nbytes, device, self)
            if held is not None:
                return held
            self._begin_unexpected(self._expecting)
        log = self._log
        if log.started:
            log = self._begin_log(node)
        reference = weakref.ref(root)
        itself = reference if base is None else None if tensor.requires_grad else weakref.ref(tensor)
        grant = log.grant if self.takes_grants and is_plain else None
        if grant is not None:
            if (grant.device != device or grant.stream != stream) or (  # both: `torch.Stream` is never != None
                device is not None and CLAIMS_ATTRIBUTE in storage.__dict__ and _may_share_a_record(log, storage)
            ):
                grant = None
            else:
                grant.num_left -= 1
                grant.room_bytes -= nbytes
                if grant.num_left < 0 or grant.room_bytes < 0 or nbytes > grant.largest_bytes:
                    grant = None
        if grant is None and log.is_behind:
            self._saving.catch_up(log)
            if log.plan is not None:
                log.follow_entered()
        # Then the plan is asked before the tensor is packed.
        is_foreseen = (
            grant is None
            and device is not None
            and self.tracks_on_device
            and (log.tracks_on_device or (log.num_packs and self._may_gather(nbytes)))
        )
        leaves = self._leaves(log, storage, node, nbytes, device) if is_foreseen else None
        if grant is None and (
            (leaves is None and (device is not None or not is_plain))
            or (
                device is None
                and log.registers_large
                and nbytes > self._windows.large_bytes
                and (storage._cdata, nbytes) not in log.num_tracked
                and CLAIMS_ATTRIBUTE not in storage.__dict__  # else it may share that record
            )
        ):
            return self._register(tensor, reference, itself, device, node, follows_plan=not is_foreseen)
        if self._fresh and node != self._fresh_node:
            self._settle_fresh()
        is_seen = is_function_mode_on() or num_dispatch_modes()
        saved = SavedTensor()
        saved.alias = detached(tensor) if is_seen else tensor.detach()
        saved.version, saved.root, saved.address = version, reference, address
        saved.storage_id, saved.log, saved.itself = storage._cdata, log, itself
        saved.index, saved.key, saved.joined = NOT_ENTERED, 0, False
        saved.device = saved.stream = saved.handle = None
        if grant is not None:
            if device is None:
                grant.append((weakref.ref(saved), (node, nbytes)))
            else:
                saved.device, saved.stream = device, grant.stream
                entry = DeviceReference(saved, self._note_death)
                entry.index = entry.log_number = NOT_ENTERED
                grant.append((entry, (node, nbytes)))
            # Asked only now: NOTE [Grants] in `ledger/grants.py`.
            if log.grant is not grant and self._saving.index_of(saved) == NOT_ENTERED:
                return self.pack(tensor, is_selected=True)
        elif device is None:
            self._track_on_host(saved, node, nbytes)
        else:
            self._track_on_device(saved, node, nbytes, device, leaves=leaves is True)
        if log.keeps_layouts:  # asked only now: NOTE [Layouts for traces] in living.py
            saved.layout = layout_of(tensor)
        if device is None and (log.plan is not None or saved.index == 0):
            log.follow_plan(saved.index, ((node, nbytes),))
        return saved

    def _leaves(
        self, log: PackLog, storage: torch.UntypedStorage, node: int, nbytes: int, device: torch.device | None
    ) -> bool | None:
        """Whether the next tensor, on an accelerator, is tracked until it leaves with others, or because there is room.

        None: it is to be registered."""
        leaves = not log.tracks_on_device
        if not log.num_packs:
            self._saving.settle()  # orders learned from earlier logs are needed for this one
        if log.plan is not None or not log.num_packs:
            log.follow_plan(log.num_packs, ((node, nbytes),), device)
            leaves = leaves or (log.plan is not None and log.plan.leaves(log.num_packs))
        if CLAIMS_ATTRIBUTE in storage.__dict__ and _may_share_a_record(log, storage):
            return None
        if leaves:
            return True if not log.tracks_on_device or self._may_gather(nbytes) else None
        if self._fits_on_device(nbytes) or storage._cdata in log.storages:
            return False
        if self._fresh and node != self._fresh_node:
            self._settle_fresh()
        return False if self._saving.find_room_to_track(log, node, nbytes) else None

    def _stays_as_small(self, nbytes: int) -> bool:
        """Whether one of `least_bytes` to `min_bytes` stays. Counts it, for those that follow in the same graph."""
        counted = self._expecting or self._log
        counted.small_bytes += nbytes
        return counted.small_bytes <= self._most_small_bytes

    def _begin_unexpected(self, expecting: HooksOff) -> None:
        self._log = open_log(self._store, self._options)
        self._expecting = None
        if not expecting.begin(self._log):
            self.hooks_off = None

    @uncompiled
    def keep(self, tensor: torch.Tensor, reason: str) -> KeptTensor | Kept:
        self._newly_kept.adder(reason)(bytes_of(tensor))
        self._num_uncounted += 1
        if self._num_uncounted >= _MOST_UNCOUNTED:
            self._count_kept()
        return keep(tensor)

    def _count_kept(self) -> None:
        self._num_uncounted = 0
        self._saving.settle()

    def settle(self, *, failed: bool) -> None:
        """The scope ends, so every kernel has run. `failed`: by an exception."""
        next_node = sequence_nr()
        if self._expecting is None:
            self._settle_fresh()
            for log in (*self._unsettled_logs, self._log):
                log.settle()
                self._saving.scan_owners(log)
        if self.hooks_off is not None and not self._unsettled_logs:
            self.hooks_off.end(next_node, failed=failed)

    def _settle_fresh(self) -> None:
        self._saving.settle(self._fresh)
        self._fresh = []

    def _begin_log(self, node: int) -> PackLog:
        if self._log.is_behind:
            self._saving.catch_up(self._log)  # the newest node may not be known yet
        if self._log.newest_node == node:
            self._unsettled_logs.append(self._log)
        else:
            self._log.settle()
        self._log = open_log(self._store, self._options)
        if self.hooks_off is not None and not self.hooks_off.removed:
            self.hooks_off = None  # this is not the graph that the scope has begun with
        return self._log

    def _register(
        self,
        tensor: torch.Tensor,
        root: weakref.ref[torch.Tensor],
        itself: weakref.ref[torch.Tensor] | None,
        device: torch.device | None,
        node: int,
        *,
        follows_plan: bool,
    ) -> SavedTensor:
        layout, log, residency = layout_of(tensor), self._log, self._residency
        fresh = self._fresh if node != self._fresh_node else []
        has_claims = CLAIMS_ATTRIBUTE in tensor.untyped_storage().__dict__
        joined = _join_record(residency, tensor, root, layout) if has_claims else None
        if joined is None:
            handle, index = self._saving.save(tensor, layout, root, device, log, node, fresh)
            record = handle.record
            self._fresh.append(record)
            self._fresh_node = node
        else:
            handle, layout = joined.handle, joined.layout
            record = handle.record
            index = self._saving.share(record, log, node, fresh)
        saved = RejoinedTensor() if joined is not None and joined.is_restored else SavedTensor()
        saved.alias, saved.version, saved.root, saved.address = None, tensor._version, root, 0
        saved.storage_id, saved.log, saved.itself = 0, log, itself
        saved.index, saved.key, saved.joined = index, record.key, False
        saved.device, saved.stream = record.device, None
        saved.handle, saved.layout = handle, layout
        if isinstance(saved, RejoinedTensor):
            saved.guard(tensor, layout)
        if follows_plan and (log.plan is not None or index == 0):
            log.follow_plan(index, log.packs[index:], record.device)
        if log.plan is not None:
            log.plan.assign(record, index, log.first_key)
        return saved


def _may_share_a_record(log: PackLog, storage: torch.UntypedStorage) -> bool:
    """Whether a tensor on an accelerator is registered because records were made of its storage. It shares one that
    lives. Where something has to leave, it has one that takes no room, if others hold the storage."""
    return log.plan is not None or not log.tracks_on_device or is_claimed(storage)


class _Joined(NamedTuple):
    """A record that already holds a tensor's bytes, and the tensor's layout over that record's storage.

    `is_restored`: the tensor lies over restored bytes; it may have another version counter than the record."""

    handle: Handle
    layout: Layout
    is_restored: bool


def _join_record(
    residency: Residency, tensor: torch.Tensor, root: weakref.ref[torch.Tensor], layout: Layout
) -> _Joined | None:
    """Let a tensor share the record that holds its bytes too; None: it needs a record of its own.

    `root`: the tensor's base, or the tensor itself."""
    for record, handle in records_over(tensor.untyped_storage(), tensor._version, residency):
        if record.span is not None:
            restored = residency.saving.rejoin(record, tensor, layout)
            if restored is not None:
                return _Joined(handle, restored, is_restored=True)
        elif record.root is root and residency.saving.join(record, layout, tensor.nbytes):
            return _Joined(handle, layout, is_restored=False)
    return None

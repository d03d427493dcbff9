"""One entry of `tiered_offload`: what autograd saves inside it is packed here.

NOTE [Not before the kernel]
Autograd saves some tensors *before* the kernel that fills them has run (the noise of `rrelu`), and every output while
others still hold it. So what a node saves is only noted; it is settled, that is, free to be read and looked at for
other owners, once a node with a higher number saves something, or the scope ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from tierstore.capture import is_capturing
from tierstore.handle import Record
from tierstore.layout import layout_of, storage_of
from tierstore.lookahead import LearnedOrders
from tierstore.ownership import is_foreign
from tierstore.store import TierStore
from tierstore.torch_names import sequence_nr
from tierstore.uncompiled import uncompiled

from .aliases import join_record
from .below import HOOKS_ARE_CALLED_BELOW, HeldTensor, is_below_autograd
from .order import PackLog, open_log
from .saved import RejoinedTensor, SavedTensor
from .select import Kept, attributes_of, bytes_of, stays_alive

__all__ = ["OffloadScope", "Select"]

Select = Callable[[torch.Tensor], bool]


class OffloadScope:
    """One entry of `tiered_offload`, on one thread, which is the only one to call it.

    Args:
        store: where to.
        select, min_bytes: as `tiered_offload`'s.
        orders: where orders are learned and recalled; None: they are not.
        lookahead_bytes: how far ahead of backward to fetch; None: see `tiered_offload`.
        device_bytes: what may stay on accelerators; None: what compute does not cover.
    """

    def __init__(
        self,
        store: TierStore,
        select: Select | None,
        orders: LearnedOrders | None,
        min_bytes: int,
        lookahead_bytes: int | None,
        device_bytes: int | None,
    ) -> None:
        self._store = store
        self._books = store.books
        self._min_bytes = max(min_bytes, 1)  # nothing is gained by storing no bytes
        self._select = select
        self._lookahead_bytes = lookahead_bytes
        self._orders = orders
        self._device_bytes = device_bytes
        self._log = self._new_log()
        self._unsettled_logs: list[PackLog] = []  # earlier ones
        self._fresh: list[Record] = []  # booked, saved by the newest node: see NOTE [Not before the kernel]
        self._fresh_node = -1
        self._device_of = store.books.moves.devices.device_of

    @uncompiled
    def pack(self, tensor: torch.Tensor) -> SavedTensor | Kept | HeldTensor:
        """Called by autograd for each tensor that it saves. Waits while the budget is full; raises as `Residency.note`.

        What it refuses is still where autograd has it.
        """
        if HOOKS_ARE_CALLED_BELOW and not tensor.requires_grad and is_below_autograd():
            return HeldTensor(self.pack, tensor)
        found = storage_of(tensor)
        if found is None:
            return self.keep(tensor, "unsupported")
        storage, address, version = found
        nbytes = storage.nbytes()
        if nbytes < self._min_bytes or not tensor.numel():
            return self.keep(tensor, "small")
        base = tensor._base
        root = tensor if base is None else base
        if stays_alive(tensor, root):
            return self.keep(tensor, "parameter")
        is_plain = storage.resizable() and not storage.is_shared()
        if not is_plain and is_foreign(storage):
            return self.keep(tensor, "alive elsewhere")
        is_in_host_memory = self._device_of(tensor) is None
        if not is_in_host_memory and is_capturing(tensor.device):
            return self.keep(tensor, "unsupported")
        if attributes_of(tensor) is not None and not tensor.requires_grad:  # NOTE [The same object] in saved.py
            return self.keep(tensor, "unsupported")
        if self._select is not None and not self._select(tensor):
            return self.keep(tensor, "selected out")
        node = sequence_nr()
        if self._fresh and node != self._fresh_node:
            self._settle_fresh()
        if self._log.started:
            self._begin_log(node)
        reference = weakref.ref(root)
        itself = reference if base is None else None if tensor.requires_grad else weakref.ref(tensor)
        if not (is_plain and is_in_host_memory):
            return self._book(tensor, reference, itself, node)
        alias, key = tensor.detach(), next(self._store.keys)
        saved = SavedTensor(alias, version, reference, address, storage._cdata, key, self._log)
        saved.itself = itself
        self._books.note(saved, node, nbytes)
        if self._log.plan is not None or saved.index == 0:
            self._log.follow_plan(saved.index)
        return saved

    @uncompiled
    def keep(self, tensor: torch.Tensor, reason: str) -> Kept:
        """Leave a saved tensor where it is."""
        self._books.count_kept(reason, bytes_of(tensor))
        return Kept(tensor)

    def settle(self, *, failed: bool) -> None:
        """The scope ends: every kernel has run. `failed`: by an exception, which matters to a traced scope alone."""
        self._settle_fresh()
        for log in (*self._unsettled_logs, self._log):
            log.is_settled = True
            self._books.survey(log)

    def _settle_fresh(self) -> None:
        self._books.settle(self._fresh)
        self._fresh = []

    def _begin_log(self, node: int) -> None:
        """The log's backward has begun: what this node saves belongs to the next."""
        if self._log.newest_node == node:
            self._unsettled_logs.append(self._log)
        else:
            self._log.is_settled = True
        self._log = self._new_log()

    def _new_log(self) -> PackLog:
        return open_log(self._store, self._lookahead_bytes, self._orders, self._device_bytes)

    def _book(
        self,
        tensor: torch.Tensor,
        root: weakref.ref[torch.Tensor],
        itself: weakref.ref[torch.Tensor] | None,
        node: int,
    ) -> SavedTensor:
        """Hand over at once what is on an accelerator, and has to leave it soon, or lies over restored bytes."""
        layout = layout_of(tensor)
        joined = join_record(self._books, tensor, root, layout)
        kind = SavedTensor
        if joined is not None:
            handle, layout = joined.handle, joined.layout
            if joined.is_restored:
                kind = RejoinedTensor
        else:
            handle = self._store.new_handle(tensor, layout)
            handle.record.root = root
            self._books.track(handle.record)
            self._fresh.append(handle.record)
            self._fresh_node = node
        log = self._log
        saved = kind(None, tensor._version, root, 0, 0, handle.record.key, log)
        saved.itself = itself
        if isinstance(saved, RejoinedTensor):
            saved.guard(tensor, layout)
        saved.index = self._books.enter(log, handle.record, node)
        if log.plan is not None or saved.index == 0:
            log.follow_plan(saved.index)
            log.place(handle.record, saved.index)
        saved.become(handle, layout)
        return saved

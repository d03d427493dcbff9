"""The saved tensors of one forward, in the order of packing, and what backward does with them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from tierstore.device import RELOAD_BYTES
from tierstore.handle import State
from tierstore.layout import Layout
from tierstore.lookahead import LearnedOrders, Lookahead, reverse_topological
from tierstore.noted import NotedLog
from tierstore.store import TierStore
from tierstore.uncompiled import uncompiled

from .compiled import large_nodes, warn_if_region

__all__ = ["PackLog", "living_log"]

_living: weakref.WeakValueDictionary[int, PackLog] = weakref.WeakValueDictionary()


class PackLog(NotedLog):
    """What was packed between the start of a scope (or the last backward) and the next backward, and its order.

    Args:
        store: where it was packed.
        lookahead_bytes: how far ahead of backward to fetch.
        orders: where orders are learned and recalled; None: the reverse-topological order is followed always.

    Attributes:
        started: backward has asked for something.
        lookahead, reload_ahead: what backward will ask for next, from the disk and from host memory.
    """

    def __init__(self, store: TierStore, lookahead_bytes: int, orders: LearnedOrders | None) -> None:
        super().__init__(store)
        _living[self.number] = self
        self.lookahead = Lookahead(lookahead_bytes)
        self.reload_ahead = Lookahead(RELOAD_BYTES if lookahead_bytes else 0)
        self.started = False
        self._orders = orders
        self._signature: int | None = None  # once something is known to have left memory
        self._asked_for: dict[int, None] = {}
        self._budget_bytes = store.host_bytes or store.staging_bytes  # for one autograd node, without a look at it
        self._large_nodes: dict[int, int] = {}

    def asked_for(self, index: int) -> None:
        """Backward asks for saved tensor `index`."""
        if not self.started:
            self._start()
        self._asked_for[index] = None
        if self._large_nodes:
            warn_if_region(self._large_nodes.pop(self.nodes[index], None), self._budget_bytes)

    def fetch(self, index: int, layout: Layout) -> torch.Tensor:
        """Saved tensor `index`, which is booked; waits only if its bytes are not in memory.

        See `TierStore.get` for what it raises.
        """
        self.asked_for(index)
        record = self.records[index]
        if record is None:
            raise RuntimeError(f"saved tensor {index} is not booked")
        if self._signature is None and record.state is not State.PENDING:
            self._look_ahead()
        if self._signature is None:
            return self.books.fetch(record, layout)
        return self.books.fetch(record, layout, self.lookahead, self.reload_ahead, index)

    def _start(self) -> None:
        self.started = True
        self.books.survey(self)
        self._large_nodes = large_nodes(self._spans(), self._budget_bytes)
        if any(record is not None and record.state is not State.PENDING for record in self.records):
            self._look_ahead()
            self.books.look_ahead(self.lookahead)

    def _look_ahead(self) -> None:
        first = self.nodes[0]
        signature = 0
        for node, nbytes in zip(self.nodes, self.sizes, strict=True):
            signature = hash((signature, node - first, nbytes))
        self._signature = signature
        learned = self._orders.recall(signature) if self._orders is not None else None
        order = learned or reverse_topological(self.nodes)
        self.lookahead.begin(self.records, order)
        self.reload_ahead.begin(self.records, order)

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """(node, storage, bytes) of all saved tensors that are alive; views of one storage have the same number."""
        for node, nbytes, record in zip(self.nodes, self.sizes, self.records, strict=True):
            if record is not None:
                yield node, record.key, nbytes
        for reference in self.noted.values():
            noted = reference()
            if noted is not None:
                yield self.nodes[noted.index], -noted.storage_id, self.sizes[noted.index]

    @uncompiled
    def __del__(self) -> None:
        # Some dictionary entries: fit for a finalizer. Half of a graph is no order to go by.
        if self._orders is not None and self._signature is not None and len(self._asked_for) * 2 > len(self.nodes):
            self._orders.learn(self._signature, tuple(self._asked_for))
        super().__del__()


def living_log(number: int) -> PackLog:
    """The log of that number. Its saved tensors keep it alive."""
    return _living[number]

"""The saved tensors of one forward, in the order of packing, and what backward does with them."""

from __future__ import annotations

import itertools
import weakref
from typing import cast

import torch

from tierstore.device import RELOAD_BYTES
from tierstore.handle import Record
from tierstore.layout import Layout
from tierstore.lookahead import LearnedOrders, Lookahead, reverse_topological
from tierstore.residency import Residency
from tierstore.store import TierStore
from tierstore.uncompiled import uncompiled

from .compiled import large_nodes, warn_if_region

__all__ = ["PackLog", "living_log", "open_log"]

_numbers = itertools.count()
_living: weakref.WeakValueDictionary[int, PackLog] = weakref.WeakValueDictionary()


class PackLog:
    """What was packed on one thread between one backward and the next, in however many scopes.

    Referenced by the saved tensors themselves, so it goes when the graph goes; it keeps nobody's bytes.

    Args:
        lookahead_bytes: how far ahead of backward to fetch.
        orders: where orders are learned and recalled; None: the reverse-topological order is followed always.
        budget_bytes: what one autograd node can ask for at once without a look at what node it is.

    Attributes:
        number: unique in this process: see `living_log`.
        started: backward has asked for something.
        lookahead, reload_ahead: what backward will ask for next, from the disk and from host memory.
    """

    def __init__(self, lookahead_bytes: int, orders: LearnedOrders | None, budget_bytes: int) -> None:
        self.number = next(_numbers)
        _living[self.number] = self
        self.lookahead = Lookahead(lookahead_bytes)
        self.reload_ahead = Lookahead(RELOAD_BYTES if lookahead_bytes else 0)
        self.started = False
        self._orders = orders
        self._records: list[Record] = []
        self._nodes: list[int] = []
        self._signature = 0
        self._seen: set[int] = set()
        self._observed: list[int] = []
        self._budget_bytes = budget_bytes
        self._large_nodes: dict[int, int] = {}

    def append(self, record: Record, node: int) -> int:
        """A tensor saved by the autograd node of that number; returns its index."""
        nodes = self._nodes
        self._signature = hash((self._signature, node - nodes[0] if nodes else 0, record.nbytes))
        nodes.append(node)
        self._records.append(record)
        return len(nodes) - 1

    def fetch(self, index: int, layout: Layout) -> torch.Tensor:
        """Saved tensor `index`; waits only if its bytes are not in memory. See `TierStore.get` for what it raises."""
        record = self._records[index]
        books = cast(Residency, record.books)
        if not self.started:
            self._start()
            books.settle()
        self._observe(index)
        return books.fetch(record, layout, self.lookahead, self.reload_ahead, index)

    def _start(self) -> None:
        self.started = True
        self._large_nodes = large_nodes(self._records, self._nodes, self._budget_bytes)
        learned = self._orders.recall(self._signature) if self._orders is not None else None
        order = learned or reverse_topological(self._nodes)
        self.lookahead.begin(self._records, order)
        self.reload_ahead.begin(self._records, order)

    def _observe(self, index: int) -> None:
        if index not in self._seen:
            self._seen.add(index)
            self._observed.append(index)
            if self._large_nodes:
                warn_if_region(self._large_nodes.pop(self._nodes[index], None), self._budget_bytes)

    @uncompiled
    def __del__(self) -> None:
        # One dictionary entry: fit for a finalizer. Half of a graph is no order to go by.
        if self._orders is not None and len(self._observed) * 2 > len(self._nodes):
            self._orders.learn(self._signature, self._observed)


def open_log(store: TierStore, lookahead_bytes: int, orders: LearnedOrders | None) -> PackLog:
    """The log for what this thread packs next: the one it has, unless that has been asked for something, or is gone.

    A model whose blocks have a scope each is one graph, so it is one log.
    """
    logs: weakref.WeakValueDictionary[object, PackLog]
    logs = store.of_thread.__dict__.setdefault("logs", weakref.WeakValueDictionary())
    options = (lookahead_bytes, orders is None)
    log = logs.get(options)
    if log is None or log.started:
        log = logs[options] = PackLog(lookahead_bytes, orders, store.host_bytes or store.staging_bytes)
    return log


def living_log(number: int) -> PackLog:
    """The log of that number. Its saved tensors keep it alive."""
    return _living[number]

"""The saved tensors of one forward, in the order of packing, and what backward does with them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import cast

import torch

from tierstore.device import RELOAD_BYTES
from tierstore.handle import Record, State
from tierstore.layout import Layout
from tierstore.lookahead import LearnedOrders, Lookahead, reverse_topological
from tierstore.plan import Plan, Trace
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

    def __init__(
        self, lookahead_bytes: int, orders: LearnedOrders | None, budget_bytes: int, host_bytes: int, device_bytes: int
    ) -> None:
        self.number = next(_numbers)
        _living[self.number] = self
        self.lookahead = Lookahead(lookahead_bytes)
        self.reload_ahead = Lookahead(RELOAD_BYTES if lookahead_bytes else 0)
        self.started = False
        self._orders = orders
        self._budgets = host_bytes, device_bytes
        self._plan: Plan | None = None
        self._records: list[Record] = []
        self._nodes: list[int] = []
        self._signatures: list[int] = []
        self._signature = 0
        self._seen: set[int] = set()
        self._observed: list[int] = []
        self._known: Trace | None = None
        self._facts: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
        self._budget_bytes = budget_bytes
        self._large_nodes: dict[int, int] = {}

    def append(self, record: Record, node: int) -> int:
        """A tensor saved by the autograd node of that number; returns its index."""
        nodes = self._nodes
        index = len(nodes)
        self._signature = hash((self._signature, node - nodes[0] if nodes else 0, record.nbytes))
        nodes.append(node)
        self._records.append(record)
        self._signatures.append(self._signature)
        if self._plan is not None or not index:
            self._follow_plan(record, index)
        return index

    def _follow_plan(self, record: Record, index: int) -> None:
        """Tell the record where it belongs, as long as the packs are those of a graph that is known."""
        plan = self._plan
        if plan is None or not plan.trace.continues(index + 1, self._signature):
            orders = self._orders
            plan = None if orders is None else orders.predict(index + 1, self._signature, *self._budgets)
            self._plan = plan = plan if plan is not None and plan.is_needed else None
        if plan is not None and plan.trace.records[index] == index:
            record.worth = self._records[0].key + plan.worths[index]
            record.place = plan.places[index]

    def fetch(self, index: int, layout: Layout) -> torch.Tensor:
        """Saved tensor `index`; waits only if its bytes are not in memory. See `TierStore.get` for what it raises."""
        record = self._records[index]
        books = cast(Residency, record.books)
        if not self.started:
            self._start()
            books.settle()
            self._note_facts()
        self._observe(index)
        return books.fetch(record, layout, self.lookahead, self.reload_ahead, index)

    def _start(self) -> None:
        self.started = True
        if self._plan is not None:
            for record in self._records:
                record.place = None  # what has not gone by now need not go
        self._large_nodes = large_nodes(self._records, self._nodes, self._budget_bytes)
        known = self._known = self._orders.recall(self._signature) if self._orders is not None else None
        order = reverse_topological(self._nodes) if known is None else known.order
        self.lookahead.begin(self._records, order)
        self.reload_ahead.begin(self._records, order)

    def _note_facts(self) -> None:
        """What a trace tells of the records; later their sizes are of what is on disk, and who held them is past."""
        pending, known = State.PENDING, self._known
        sizes = [0 if record.shared and record.state is pending else record.nbytes for record in self._records]
        if known is not None:  # of the same packs, the rest is the same
            self._facts = known.signatures, known.records, sizes, known.on_device
            return
        first: dict[int, int] = {}
        indices = [first.setdefault(record.key, index) for index, record in enumerate(self._records)]
        on_device = [record.device is not None for record in self._records]
        self._facts = (
            self._signatures[: len(sizes)],
            indices,
            sizes,
            on_device,
        )  # others may be packed on another thread

    def _observe(self, index: int) -> None:
        if index not in self._seen:
            self._seen.add(index)
            self._observed.append(index)
            if self._large_nodes:
                warn_if_region(self._large_nodes.pop(self._nodes[index], None), self._budget_bytes)

    @uncompiled
    def __del__(self) -> None:
        # Fit for a finalizer: no more than entries of dictionaries. Nothing asked for is nothing to go by.
        if self._orders is not None and self._observed:
            self._orders.learn(Trace(*self._facts, self._observed))


def open_log(store: TierStore, lookahead_bytes: int, orders: LearnedOrders | None) -> PackLog:
    """The log for what this thread packs next: the one it has, unless that has been asked for something, or is gone.

    A model whose blocks have a scope each is one graph, so it is one log.
    """
    logs: weakref.WeakValueDictionary[object, PackLog]
    logs = store.of_thread.__dict__.setdefault("logs", weakref.WeakValueDictionary())
    device_bytes = store.books.moves.devices.resident.limit_bytes or 0
    options = (lookahead_bytes, orders is None, device_bytes)
    log = logs.get(options)
    if log is None or log.started:
        budget_bytes = store.host_bytes or store.staging_bytes
        log = logs[options] = PackLog(lookahead_bytes, orders, budget_bytes, store.host_bytes, device_bytes)
    return log


def living_log(number: int) -> PackLog:
    """The log of that number. Its saved tensors keep it alive."""
    return _living[number]

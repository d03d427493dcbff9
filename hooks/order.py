"""The saved tensors of one forward, in the order of packing, and what backward does with them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from tierstore.coverage import Coverage, GraphTimes
from tierstore.handle import Record, State
from tierstore.layout import Layout
from tierstore.lookahead import LearnedOrders, Lookahead, reverse_topological
from tierstore.noted import NotedLog
from tierstore.plan import Plan, Trace, add_pack
from tierstore.reach import Reach
from tierstore.store import TierStore

from .compiled import large_nodes, warn_if_region
from .living import enlist

__all__ = ["LogTrace", "PackLog", "open_log"]


class LogTrace(Protocol):
    """A trace that follows a log."""

    def booked(self, index: int, record: int) -> None:
        """Saved tensor `index`, until now only noted, has got a record, of that key. Under the store's lock."""


class PackLog(NotedLog):
    """What was packed on one thread between one backward and the next, in however many scopes, and its order.

    Args:
        store: where it was packed.
        lookahead_bytes: how far ahead of backward to fetch; None: see NOTE [No farther than it takes] in `reach.py`.
        orders: where orders are learned and recalled; None: the reverse-topological order is followed always.
        device_bytes: what may stay on accelerators; None: what compute does not cover.

    Attributes:
        started: backward has asked for something.
        trace: the trace that its packs are in; None: they are in none.
        lookahead, reload_ahead: what backward will ask for next, from the disk and from host memory.
    """

    def __init__(
        self, store: TierStore, lookahead_bytes: int | None, orders: LearnedOrders | None, device_bytes: int | None
    ) -> None:
        super().__init__(store)
        enlist(self)
        self._is_reach_found = lookahead_bytes is None
        self.lookahead = Lookahead[Record](
            store.host_bytes + store.staging_bytes if lookahead_bytes is None else lookahead_bytes
        )
        self.reload_ahead = Lookahead[Record](0 if lookahead_bytes == 0 else sys.maxsize)  # the device tier bounds it
        self.started = False
        self.trace: LogTrace | None = None
        self._orders = orders
        host_bytes, staging_bytes = self.books.moves.books.limits
        self._budgets = host_bytes, device_bytes, staging_bytes
        self._times: GraphTimes | None = None
        self._signature = 0  # of the packs so far, as long as there is a plan
        self._asked_for: dict[int, None] = {}
        self._trace: _TraceOfPacks | None = None
        self._region_bytes = store.host_bytes or store.staging_bytes  # for one autograd node, without a look at it
        self._large_nodes: dict[int, int] = {}

    def follow_with(self, trace: LogTrace) -> None:
        """From now on that trace follows this log, and no other."""
        self.trace = trace

    # --- forward ------------------------------------------------------------------------------------------------

    def follow_plan(self, index: int) -> None:
        """Pack `index`, the first or the next after those that followed the plan, has come: does it go on as known?"""
        self._signature = add_pack(self._signature, self.nodes[index] - self.nodes[0], self.sizes[index])
        plan, orders = self.plan, self._orders
        if plan is None or not plan.trace.continues(index + 1, self._signature):
            plan = None if orders is None else orders.predict(index + 1, self._signature, *self._budgets)
            if orders is not None and self._budgets[1] is None:
                self._keep_uncovered(orders.coverage, plan, index)
            self.plan = plan if plan is not None and plan.is_needed else None

    def _keep_uncovered(self, coverage: Coverage, plan: Plan | None, index: int) -> None:
        """See NOTE [What compute covers] in `coverage.py`. Of a graph that is not known, nothing stays."""
        self.books.keep_on_device(0 if plan is None else coverage.staying_bytes(plan.trace.signatures[-1]))
        record = self.records[index]
        if plan is not None and index == 0 and record is not None and record.device is not None:
            self._times = self.books.time_graph(record)

    def times_from(self, record: Record) -> GraphTimes:
        """Of the graph, whose first pack the record is, on an accelerator; for a trace."""
        return self.books.time_graph(record) if self._times is None else self._times

    # --- backward -----------------------------------------------------------------------------------------------

    def come_in(self, index: int, record: Record) -> None:
        """See `NotedLog.come_in`."""
        super().come_in(index, record)
        if self.trace is not None:
            self.trace.booked(index, record.key)
        self.lookahead.come_in(index, record)
        self.reload_ahead.come_in(index, record)

    def asked_for(self, index: int) -> None:
        """Backward asks for saved tensor `index`."""
        if not self.started:
            self._start()
            if self._trace is not None and self.records[index] is None:  # else it is asked for first
                self.books.look_ahead(self.lookahead)
        self._asked_for[index] = None
        if self._large_nodes:
            warn_if_region(self._large_nodes.pop(self.nodes[index], None), self._region_bytes)

    def fetch(self, index: int, layout: Layout) -> torch.Tensor:
        """Saved tensor `index`, which is booked; waits only if its bytes are not in memory.

        See `TierStore.get` for what it raises.
        """
        self.asked_for(index)
        record = self.records[index]
        if record is None:
            raise RuntimeError(f"saved tensor {index} is not booked")
        if self._trace is None:
            if record.state is State.PENDING:
                return self.books.fetch(record, layout)
            self._look_ahead()
        return self.books.fetch(record, layout, self.lookahead, self.reload_ahead, index)

    def _start(self) -> None:
        self.started = True
        self.plan = None
        for record in self.records:
            if record is not None:
                record.place = None  # what has not gone by now need not go
        self.books.survey(self)
        nodes, sizes, records = self._packs()
        self._large_nodes = large_nodes(zip(nodes, self._storages(records), sizes, strict=True), self._region_bytes)
        if any(record is not None and record.state is not State.PENDING for record in self.records):
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Something has left its place: from now on what will be asked for is brought back before."""
        nodes, sizes, records = self._packs()
        signatures = list(_signatures(nodes, sizes))
        known = self._orders.recall(signatures[-1]) if self._orders is not None else None
        order = reverse_topological(nodes) if known is None else known.order
        self.lookahead.begin(self.records, order)
        self.reload_ahead.begin(self.records, order)
        pending = State.PENDING  # later, who else held a record is past
        kept = [record is not None and record.state is pending and record.shared for record in records]
        sizes = [0 if is_kept else nbytes for nbytes, is_kept in zip(sizes, kept, strict=True)]
        if known is not None:  # of the same packs, the rest is the same
            self._trace = known.signatures, known.records, sizes, known.on_device
        else:
            first: dict[int, int] = {}
            indices = [first.setdefault(storage, index) for index, storage in enumerate(self._storages(records))]
            on_device = [record is not None and record.device is not None for record in records]
            self._trace = signatures, indices, sizes, on_device
        if self._orders is not None:
            reach = self.lookahead.reach
            if self._is_reach_found and not any(self._trace[3]):  # ahead of an accelerator, the host waits in any case
                reach.is_far = not self._orders.reaches.is_near(signatures[-1])
            learn = partial(_learn, self._orders, self._trace, self._asked_for, self._times)
            self.remains.then = partial(learn, reach, self._budgets[2])

    def _packs(self) -> _Packs:
        """What is packed by now. Another thread may be in the midst of a pack, which enters its record last."""
        num_packs = len(self.records)
        return _Packs(self.nodes[:num_packs], self.sizes[:num_packs], self.records[:num_packs])

    def _storages(self, records: Sequence[Record | None]) -> list[int]:
        """Of each pack a number that it shares with other packs of the same storage, as far as they are alive."""
        numbers = [-1 - index if record is None else record.key for index, record in enumerate(records)]
        for index, reference in list(self.noted.items()):
            noted = reference()
            if noted is not None and index < len(numbers):
                numbers[index] = -noted.storage_id  # an address, so no index
        return numbers


class _Packs(NamedTuple):
    """The lists of a log, all of the same length."""

    nodes: list[int]
    sizes: list[int]
    records: list[Record | None]


_TraceOfPacks = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""What is known of a `Trace` when backward begins: all but the order."""


def _learn(
    orders: LearnedOrders,
    trace: _TraceOfPacks,
    asked_for: Iterable[int],
    times: GraphTimes | None,
    reach: Reach,
    staging_bytes: int,
) -> None:
    """A log is gone: learn in which order backward asked, how fast, and how long it waited for copies."""
    signatures = trace[0]
    num_packs = len(signatures)  # another thread may have packed more since
    orders.learn(Trace(*trace, [index for index in asked_for if index < num_packs]))
    orders.reaches.note(signatures[-1], reach, staging_bytes)
    if times is not None:
        orders.coverage.note(signatures[-1], times)


def _signatures(nodes: Sequence[int], sizes: Sequence[int]) -> Iterator[int]:
    signature = 0
    for node, nbytes in zip(nodes, sizes, strict=True):
        signature = add_pack(signature, node - nodes[0], nbytes)
        yield signature


def open_log(
    store: TierStore, lookahead_bytes: int | None, orders: LearnedOrders | None, device_bytes: int | None
) -> PackLog:
    """The log for what this thread packs next: the one it has, unless that has been asked for something, or is gone.

    A model whose blocks have a scope each is one graph, so it is one log. One that is mostly of graphs that are gone,
    without a backward, is left to what is still alive of it.
    """
    logs: dict[object, weakref.ref[PackLog]] = store.of_thread.__dict__.setdefault("logs", {})
    options = (lookahead_bytes, orders is None, device_bytes)
    reference = logs.get(options)
    log = None if reference is None else reference()
    if log is None or log.started or log.is_mostly_dead():
        for other in [other for other, reference in logs.items() if reference() is None]:
            del logs[other]
        log = PackLog(store, lookahead_bytes, orders, device_bytes)
        logs[options] = weakref.ref(log)
    return log

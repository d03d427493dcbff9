"""The log of a graph: its saved tensors in the order of packing, and what backward does with that order.

In forward, `open_log` gives a thread the log to pack into, and each pack is compared with the graphs that are known. In
backward, the log counts what is asked for and has the store bring back what will be asked for next. When the graph is
gone, the order in which backward asked is learned, for the next forward that packs the same.

The decisions are made in `tierstore/rules`, which knows only numbers: `plan.py` says what stays and what leaves,
`lookahead.py` what comes back next, `reach.py` how far ahead.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from tierstore.residency.graph_times import GraphTimes
from tierstore.residency.handle import Record
from tierstore.residency.layout import Layout
from tierstore.residency.noted import NotedLog
from tierstore.residency.residency import Residency
from tierstore.rules.coverage import Coverage
from tierstore.rules.lookahead import LearnedOrders, Lookahead, reverse_topological
from tierstore.rules.plan import Plan, Trace, add_pack
from tierstore.rules.reach import Reach
from tierstore.rules.state import State
from tierstore.store.tier_store import TierStore

from .compiled import large_nodes, warn_if_region
from .living import enlist

__all__ = ["LogOptions", "LogRecording", "PackLog", "open_log"]


class LogOptions(NamedTuple):
    """The arguments of `tiered_offload` that a log follows.

    Attributes:
        lookahead_bytes: how far ahead of backward to fetch; None: it is found, see NOTE [No farther than it takes] in
            `reach.py`.
        orders: the orders that are known, to learn and to recall; None: the reverse-topological order is followed.
        device_bytes: how much may stay on accelerators; None: it is found, see NOTE [What compute covers] in
            `coverage.py`.
    """

    lookahead_bytes: int | None
    orders: LearnedOrders | None
    device_bytes: int | None


class LogRecording(Protocol):
    """The recording of a trace, as far as a log tells it something."""

    def booked(self, index: int, record: int) -> None:
        """Saved tensor `index`, until now only noted, has got the record of that key. Under the store's lock."""


class PackLog(NotedLog):
    """The log of one graph: what one thread packed between two backwards, in one scope or in several.

    Args:
        store: the store that it was packed into.
        options: see `LogOptions`.

    Attributes:
        started: backward has asked for something.
        small_bytes: how much has stayed in its place for being small, counted once for each tensor.
        recording: the recording of the trace that the graph is in; None: it is in none.
        lookahead: what backward will ask for next, to be read from disk.
        reload_ahead: likewise, to be copied from host memory to its accelerator.
    """

    def __init__(self, store: TierStore, options: LogOptions) -> None:
        super().__init__(store, store.residency, store.residency.begin_log)
        self.residency: Residency = store.residency
        enlist(self)
        lookahead_bytes = options.lookahead_bytes
        self._finds_reach = lookahead_bytes is None
        self.lookahead = Lookahead[Record](
            store.host_bytes + store.staging_bytes if lookahead_bytes is None else lookahead_bytes
        )
        self.reload_ahead = Lookahead[Record](0 if lookahead_bytes == 0 else sys.maxsize)  # the device tier bounds it
        self.started = False
        self.small_bytes = 0
        self.recording: LogRecording | None = None
        host_bytes, staging_bytes = self.residency.window_limits
        self._budgets = _Budgets(host_bytes, options.device_bytes, staging_bytes)
        self._orders = options.orders
        self._times: GraphTimes | None = None
        self._signature = 0  # of the packs so far, as long as there is a plan
        self._asked_for: dict[int, None] = {}  # an ordered set
        self._trace: _TraceSoFar | None = None  # None: nothing has left its place, or backward has not begun
        self._region_bytes = store.host_bytes or store.staging_bytes  # one node may save that much unnoticed
        self._large_nodes: dict[int, int] = {}  # bytes of the nodes that have saved more than that

    def record_to(self, recording: LogRecording) -> None:
        """From now on, tell that recording, and no other."""
        self.recording = recording

    # --- forward ------------------------------------------------------------------------------------------------

    def follow_plan(self, index: int) -> None:
        """Compare pack `index` with the graphs that are known, and choose the plan that is followed from now on.

        To be called for the first pack of a log, and for each next one as long as there is a plan.
        """
        self._signature = add_pack(self._signature, self.nodes[index] - self.nodes[0], self.sizes[index])
        plan, orders = self.plan, self._orders
        if plan is None or not plan.trace.continues(index + 1, self._signature):
            plan = None if orders is None else orders.predict(index + 1, self._signature, *self._budgets)
            if orders is not None and self._budgets.device_bytes is None:
                self._keep_uncovered(orders.coverage, plan, index)
            self.plan = plan if plan is not None and plan.is_needed else None

    def _keep_uncovered(self, coverage: Coverage, plan: Plan | None, index: int) -> None:
        """Leave on the accelerator what compute does not cover; of an unknown graph, nothing.

        See NOTE [What compute covers] in `coverage.py`.
        """
        self.residency.keep_on_device(0 if plan is None else coverage.staying_bytes(plan.trace.signatures[-1]))
        record = self.records[index]
        if plan is not None and index == 0 and record is not None and record.device is not None:
            self._times = self.residency.time_graph(record)

    def times_from(self, record: Record) -> GraphTimes:
        """The times of the graph on its accelerator, for a trace. `record`: of its first pack."""
        return self.residency.time_graph(record) if self._times is None else self._times

    def settle(self) -> None:
        """Every kernel has run whose saved tensors are packed here: see NOTE [Not before the kernel] in `scope.py`."""
        self.is_settled = True

    # --- backward -----------------------------------------------------------------------------------------------

    def come_in(self, index: int, record: Record) -> None:
        """See `NotedLog.come_in`."""
        super().come_in(index, record)
        if self.recording is not None:
            self.recording.booked(index, record.key)
        self.lookahead.come_in(index, record)
        self.reload_ahead.come_in(index, record)

    def asked_for(self, index: int) -> None:
        """Backward asks for saved tensor `index`."""
        if not self.started:
            self._start()
            if self._trace is not None and self.records[index] is None:  # one with a record looks ahead in `fetch`
                self.residency.look_ahead(self.lookahead)
        self._asked_for[index] = None
        if self._large_nodes:
            warn_if_region(self._large_nodes.pop(self.nodes[index], None), self._region_bytes)

    def fetch(self, index: int, layout: Layout) -> torch.Tensor:
        """Saved tensor `index`, which has a record, in that geometry. Waits only if its bytes are not in memory.

        Raises what `TierStore.get` raises.
        """
        self.asked_for(index)
        record = self.records[index]
        if record is None:
            raise RuntimeError(f"saved tensor {index} is not booked")
        if self._trace is None:
            if record.state is State.PENDING:
                return self.residency.fetch(record, layout)
            self._look_ahead()
        return self.residency.fetch(record, layout, self.lookahead, self.reload_ahead, index)

    def _start(self) -> None:
        """Backward asks for something for the first time."""
        self.started = True
        self.plan = None
        self.residency.begin_backward(self)
        nodes, sizes, records = self._packs()
        self._large_nodes = large_nodes(zip(nodes, self._storages(records), sizes, strict=True), self._region_bytes)
        if any(record is not None and record.state is not State.PENDING for record in self.records):
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Something has left its place: from now on, bring back what backward will ask for before it asks."""
        packs = self._packs()
        signatures = list(_signatures(packs.nodes, packs.sizes))
        known = self._orders.recall(signatures[-1]) if self._orders is not None else None
        order = reverse_topological(packs.nodes) if known is None else known.order
        self.lookahead.begin(self.records, order)
        self.reload_ahead.begin(self.records, order)
        self._trace = trace = self._trace_so_far(packs, signatures, known)
        if self._orders is not None:
            reach = self.lookahead.reach
            if self._finds_reach and not any(trace.on_device):  # ahead of an accelerator, the host waits in any case
                reach.begin(is_far=not self._orders.reaches.is_near(signatures[-1]))
            learn = partial(_learn, self._orders, trace, self._asked_for, self._times)
            self.remains.call_at_end(partial(learn, reach, self._budgets.staging_bytes))

    def _trace_so_far(self, packs: _Packs, signatures: Sequence[int], known: Trace | None) -> _TraceSoFar:
        """The trace of this graph, but for the order. `known`: a trace of the same packs, if there is one."""
        pending = State.PENDING  # `shared` tells something in this state alone
        is_kept = [record is not None and record.state is pending and record.shared for record in packs.records]
        sizes = [0 if kept else nbytes for nbytes, kept in zip(packs.sizes, is_kept, strict=True)]
        if known is not None:
            return _TraceSoFar(known.signatures, known.records, sizes, known.on_device)
        first: dict[int, int] = {}
        indices = [first.setdefault(storage, index) for index, storage in enumerate(self._storages(packs.records))]
        on_device = [record is not None and record.device is not None for record in packs.records]
        return _TraceSoFar(signatures, indices, sizes, on_device)

    def _packs(self) -> _Packs:
        """Copies of the lists, as far as the packs are complete.

        Another thread may be in the midst of a pack. It enters the record last.
        """
        num_packs = len(self.records)
        return _Packs(self.nodes[:num_packs], self.sizes[:num_packs], self.records[:num_packs])

    def _storages(self, records: Sequence[Record | None]) -> list[int]:
        """For each pack, the number of its storage: packs of one storage have the same, unless they are dead."""
        numbers = [-1 - index if record is None else record.key for index, record in enumerate(records)]
        for index, reference in list(self.noted.items()):
            noted = reference()
            if noted is not None and index < len(numbers):
                numbers[index] = -noted.storage_id  # an address, so it is none of the numbers above
        return numbers


class _Budgets(NamedTuple):
    """How much stays where. `device_bytes`: None: it is found."""

    host_bytes: int
    device_bytes: int | None
    staging_bytes: int


class _Packs(NamedTuple):
    """The lists of a log, all of the same length."""

    nodes: list[int]
    sizes: list[int]
    records: list[Record | None]


class _TraceSoFar(NamedTuple):
    """A `Trace`, as far as it is known when backward begins: all but the order."""

    signatures: Sequence[int]
    records: Sequence[int]
    sizes: Sequence[int]
    on_device: Sequence[int]


def _learn(
    orders: LearnedOrders,
    trace: _TraceSoFar,
    asked_for: Iterable[int],
    times: GraphTimes | None,
    reach: Reach,
    staging_bytes: int,
) -> None:
    """A graph is gone: learn in which order its backward asked, how fast, and how long it waited for copies."""
    signature = trace.signatures[-1]
    num_packs = len(trace.signatures)  # another thread may have packed more since
    orders.learn(Trace(*trace, [index for index in asked_for if index < num_packs]))
    orders.reaches.note(signature, reach, staging_bytes)
    if times is not None:
        orders.coverage.note(signature, times)


def _signatures(nodes: Sequence[int], sizes: Sequence[int]) -> Iterator[int]:
    """For each pack, the signature of all packs up to it."""
    signature = 0
    for node, nbytes in zip(nodes, sizes, strict=True):
        signature = add_pack(signature, node - nodes[0], nbytes)
        yield signature


def open_log(store: TierStore, options: LogOptions) -> PackLog:
    """The log that this thread packs into next.

    As a rule it is the one that the thread packed into last, with the same options: a model whose blocks have a scope
    each is one graph, and so one log. A new log begins where that one is gone, where backward has begun on it, and
    where most of what it holds is dead: its graphs were dropped without a backward.
    """
    logs: dict[LogOptions, weakref.ref[PackLog]] = store.of_thread.__dict__.setdefault("logs", {})
    reference = logs.get(options)
    log = None if reference is None else reference()
    if log is None or log.started or log.is_mostly_dead():
        for other in [other for other, reference in logs.items() if reference() is None]:
            del logs[other]
        log = PackLog(store, options)
        logs[options] = weakref.ref(log)
    return log

"""The log of a graph: its saved tensors in the order of packing, and what backward does with that order.

In forward, each pack is compared with the graphs that are known. In backward, the log counts what is asked for and has
the store bring back what comes next. When the graph is gone, the order in which backward asked is learned. The
decisions are made in `tierstore/ledger`: `plan.py`, `lookahead.py`, `reach.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tierstore.errors import ModifiedInPlaceError
from tierstore.ledger.coverage import Coverage
from tierstore.ledger.graph_order import Budgets, GraphOrder, Packs
from tierstore.ledger.ledger import NUM_PASSED
from tierstore.ledger.lookahead import LearnedOrders
from tierstore.ledger.plan import Plan
from tierstore.ledger.state import State
from tierstore.residency.graph_times import GraphTimes
from tierstore.residency.handle import Record
from tierstore.residency.layout import Layout, alias_of, describe
from tierstore.residency.noted import NotedLog
from tierstore.residency.residency import Residency
from tierstore.store.tier_store import TierStore

from .advice import large_nodes, warn_if_region
from .living import enlist
from .owners import OwnerWatch

_KEY_SHIFT = 48
"""Of the key of a group, so that numbers of its storages are no keys."""


class LogOptions(NamedTuple):
    """The arguments of `tiered_offload` that a log follows.

    Attributes:
        lookahead_bytes: None: it is found, see NOTE [No farther than it takes] in `reach.py`.
        orders: the orders that are known, to learn and to recall; None: the reverse-topological order is followed.
        device_bytes: None: it is found, see NOTE [What compute covers] in `coverage.py`.
    """

    lookahead_bytes: int | None
    orders: LearnedOrders | None
    device_bytes: int | None


class PackLog(NotedLog):
    """The log of one graph: what one thread packed between two backwards, in one scope or in several.

    Attributes:
        started: backward has asked for something.
        small_bytes: how much has stayed in its place for being small, counted once for each tensor.
        recording: the recording of the trace that the graph is in; None: it is in none.
    """

    def __init__(self, store: TierStore, options: LogOptions) -> None:
        super().__init__(store, store._core.residency, store._core.residency.begin_log)
        self.residency: Residency = store._core.residency
        enlist(self)
        self.started = False
        self.small_bytes = 0
        self.recording: OwnerWatch | None = None
        host_bytes, staging_bytes = self.residency.window_limits
        orders = options.orders
        self._coverage = orders.coverage if orders is not None and options.device_bytes is None else None
        self._order = GraphOrder[Record](
            orders,
            Budgets(host_bytes, options.device_bytes, staging_bytes),
            options.lookahead_bytes,
            store.host_bytes + store.staging_bytes,
        )
        self._asked_for = self._order.asked_for
        self.tracks = options.device_bytes != 0
        self._num_passed = 0  # tracked tensors that backward has asked for
        self._times: GraphTimes | None = None
        self._region_bytes = store.host_bytes or store.staging_bytes  # one node may save that much unnoticed
        self._large_nodes: dict[int, int] = {}  # bytes of the nodes that have saved more than that

    # --- forward ------------------------------------------------------------------------------------------------

    def follow_plan(self, index: int, node: int, nbytes: int, device: torch.device | None = None) -> None:
        """Compare pack `index`, of autograd node `node`, with the graphs that are known; choose the plan to follow.
        `device`: the accelerator that it is on.

        To be called for the first pack of a log, and for each next one as long as there is a plan: after the pack, or
        before it where the plan decides whether the tensor is tracked.
        """
        order = self._order
        if order.follow(index, node - self.packs[0][0] if index else 0, nbytes):
            if self._coverage is not None:
                self._keep_uncovered(self._coverage, order.predicted, None if index else device)
            self.plan = order.plan

    def _keep_uncovered(self, coverage: Coverage, plan: Plan | None, device: torch.device | None) -> None:
        """Leave on the accelerator what compute does not cover: see NOTE [What compute covers] in `coverage.py`.
        `device`: that of the first tensor, with which the times begin."""
        self.residency.keep_on_device(0 if plan is None else coverage.staying_bytes(plan.trace.signatures[-1]))
        if plan is not None and device is not None:
            self._times = self.residency.time_graph(device)

    def times_from(self, device: torch.device) -> GraphTimes:
        return self.residency.time_graph(device) if self._times is None else self._times

    def settle(self) -> None:
        """Every kernel has run whose saved tensors are packed here: see NOTE [Not before the kernel] in `scope.py`."""
        self.is_settled = True

    # --- backward -----------------------------------------------------------------------------------------------

    def come_in(self, indices: Sequence[int], record: Record) -> None:
        super().come_in(indices, record)
        if self.recording is not None:
            for index in indices:
                self.recording.booked(index, record.key)
        self._order.come_in(indices, record)

    def asked_for(self, index: int) -> None:
        if not self.started:
            self._start()
            if self._order.is_followed and self.records[index] is None:  # one with a record looks ahead in `fetch`
                self.residency.handing_out.look_ahead(self._order.lookahead)
        self._asked_for[index] = None
        if self._large_nodes:
            warn_if_region(self._large_nodes.pop(self.packs[index][0], None), self._region_bytes)

    def pass_by(self, index: int, device: torch.device) -> None:
        """Backward gets tracked tensor `index`: see NOTE [Tracked, then booked] in `tracked.py`."""
        self.residency.handing_out.asked_on(device)
        order = self._order
        if order.is_followed:
            if not self._num_passed % NUM_PASSED:
                self.residency.handing_out.pass_by(order.lookahead, order.reload_ahead, index)
            self._num_passed += 1

    def fetch(self, index: int, layout: Layout) -> torch.Tensor:
        """Saved tensor `index`, which has a record, in that geometry. Waits only if its bytes are not in memory.

        Raises what `TierStore.get` raises.
        """
        if self.started and not self._large_nodes:
            self._asked_for[index] = None  # as `asked_for`, without its call
        else:
            self.asked_for(index)
        record = self.records[index]
        if record is None:
            raise RuntimeError(f"saved tensor {index} is not booked")
        member, order = None, self._order
        if index in self.members:
            member = self.members[index]
            if member.counter._version != member.version:
                raise ModifiedInPlaceError(describe(layout), member.version, member.counter._version)
            if order.is_followed:
                view = self.residency.handing_out.next_member(record, member, layout, order.lookahead, index)
                if view is not None:
                    return view
        if not order.is_followed:
            if record.state is State.PENDING:
                return self.residency.handing_out.fetch(record, layout, index=index, member=member)
            self._look_ahead()
        return self.residency.handing_out.fetch(record, layout, order.lookahead, order.reload_ahead, index, member)

    def give(self, index: int, layout: Layout) -> torch.Tensor:
        """The same for a traced graph: noted or not. `layout` has no lazy bits."""
        noted = self.find(index)
        return self.fetch(index, layout) if noted is None else alias_of(noted.unpack(), noted.layout)

    def _start(self) -> None:
        self.started = True
        self.plan = None
        self.residency.saving.begin_backward(self)
        packs = self._packs()
        self._large_nodes = large_nodes(zip(packs.nodes, packs.storages, packs.sizes, strict=True), self._region_bytes)
        for record in self.records:
            if record is not None and record.state is not State.PENDING:
                self._look_ahead()
                break

    def _look_ahead(self) -> None:
        self._order.look_ahead(self._packs(), self.records)
        ending = self._order.ending(self._times)
        if ending is not None:
            self.remains.call_at_end(ending)

    def _packs(self) -> Packs[Record]:
        """Copies of the lists, as far as packs are complete: another thread may be in one; its record comes last."""
        records = list(self.records)
        packs = self.packs[: len(records)]
        on_device = [
            index in self.tracked if record is None else record.device is not None
            for index, record in enumerate(records)
        ]
        nodes, sizes = [node for node, _ in packs], [nbytes for _, nbytes in packs]
        return Packs(nodes, sizes, records, self._storages(records), on_device)

    def _storages(self, records: Sequence[Record | None]) -> list[int]:
        """For each pack, the number of its storage: packs of one storage have the same, unless they are dead."""
        numbers = [-1 - index if record is None else record.key for index, record in enumerate(records)]
        for index, member in list(self.members.items()):
            if index < len(numbers):
                numbers[index] = numbers[index] << _KEY_SHIFT | member.first_byte
        for reference in self.unbooked():
            noted = reference()
            if noted is not None and noted.index < len(numbers):
                numbers[noted.index] = -noted.storage_id  # an address, so it is none of the numbers above
        return numbers


def open_log(store: TierStore, options: LogOptions) -> PackLog:
    """The log that this thread packs into next: as a rule the one that it packed into last, with the same options.

    A model whose blocks have a scope each is one graph, and so one log. A new log begins where that one is gone, where
    backward has begun on it, and where most of what it holds is dead: its graphs were dropped without a backward.
    """
    logs: dict[LogOptions, weakref.ref[PackLog]] = store._core.of_thread.__dict__.setdefault("logs", {})
    reference = logs.get(options)
    log = None if reference is None else reference()
    if log is None or log.started or log.is_mostly_dead():
        for other in [other for other, reference in logs.items() if reference() is None]:
            del logs[other]
        log = PackLog(store, options)
        logs[options] = weakref.ref(log)
    return log

"""The log of a real graph: what its backward asks for is fetched.

In forward, each pack is compared with the graphs that are known. In backward, the log counts what is asked for and has
the store bring back what comes next. When the graph is gone, the order in which backward asked is learned. The
decisions are made in `tierstore/ledger`: `log.py`, `plan.py`, `lookahead.py`."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from tierstore.errors import ModifiedInPlaceError
from tierstore.ledger.graph_order import Budgets, GraphOrder
from tierstore.ledger.ledger import NUM_PASSED
from tierstore.ledger.lookahead import LearnedOrders
from tierstore.ledger.plan import Plan
from tierstore.ledger.state import State
from tierstore.ledger.whole_graphs import WholeGraph, nodes_of
from tierstore.residency.graph_times import GraphTimes
from tierstore.residency.handle import Record
from tierstore.residency.residency import Residency
from tierstore.residency.tracked import TrackedLog
from tierstore.store.tier_store import TierStore
from tierstore.tensors.layout import Layout, alias_of, describe
from tierstore.tensors.torch_names import name_of_node
from tierstore.tracing.recorder import Recorder

from .advice import large_nodes, warn_if_region
from .living import enlist


class LogOptions(NamedTuple):
    """The arguments of `tiered_offload` that a log follows.

    Attributes:
        lookahead_bytes: None: it is found, see NOTE [No farther than it takes] in `lookahead.py`.
        orders: the orders that are known, to learn and to recall; None: the reverse-topological order is followed.
        device_bytes: None: it is found, see NOTE [What compute covers] in `coverage.py`.
    """

    lookahead_bytes: int | None
    orders: LearnedOrders | None
    device_bytes: int | None


class PackLog(TrackedLog):
    """The log of one graph: what one thread packed between two backwards, in one scope or in several.

    Attributes:
        ended_with: how it was when the only scope that packed into it had ended; None: it is not one whose scope may do
            without hooks. See NOTE [Hooks off] in `ledger/whole_graphs.py`.
        large_nodes: bytes of the nodes that one region may not ask for unnoticed, once backward has begun.
        small_bytes: how much has stayed in its place for being small, counted once for each tensor.
    """

    residency: Residency
    recording: Recorder | None
    times: GraphTimes | None

    def __init__(self, store: TierStore, options: LogOptions) -> None:
        residency, orders = store._core.residency, options.orders
        host_bytes, staging_bytes = residency.window_limits
        order = GraphOrder[Record](
            orders,
            Budgets(host_bytes, options.device_bytes, staging_bytes),
            options.lookahead_bytes,
            store.host_bytes + store.staging_bytes,
        )
        super().__init__(residency, order, residency.begin_log)
        self.store = store
        self._whole_graphs = store._core.whole_graphs
        enlist(self)
        store._core.use.note_graph(self)
        self.small_bytes = 0
        self.ended_with: WholeGraph | None = None
        self._coverage = orders.coverage if orders is not None and options.device_bytes is None else None
        self.tracks_on_device = options.device_bytes != 0
        self._num_passed = 0  # tracked tensors that backward has asked for
        self._region_bytes = store.host_bytes or store.staging_bytes  # one node may save that much unnoticed
        self.large_nodes: dict[int, int] = {}

    # --- forward ------------------------------------------------------------------------------------------------

    def _prepare(self, plan: Plan | None, device: torch.device | None) -> None:
        """Leave on the accelerator what compute does not cover: see NOTE [What compute covers] in `coverage.py`.
        `device`: that of the first tensor, with which the times begin."""
        coverage = self._coverage
        if coverage is None:
            return
        staying_bytes = 0 if plan is None else coverage.staying_bytes(plan.trace.measurable, plan.scale or 1)
        self.residency.keep_on_device(staying_bytes)
        if plan is not None and device is not None:
            is_marked = plan.scale is not None or coverage.is_to_be_marked(plan.trace.measurable)
            self.times = self.residency.time_graph(device, is_marked=is_marked)

    # --- backward -----------------------------------------------------------------------------------------------

    def asked_for(self, index: int) -> None:
        if not self.started:
            self.start(index)
        self.asked[index] = None
        if self.large_nodes:
            warn_if_region(self.large_nodes.pop(self.packs[index][0], None), self._region_bytes)

    def pass_by(self, index: int, device: torch.device) -> None:
        """Backward gets tracked tensor `index`: see NOTE [Tracked on a device] in `ledger/on_device.py`."""
        self.residency.handing_out.asked_on(device)
        order = self.order
        if order.is_followed:
            if not self._num_passed % NUM_PASSED:
                self.residency.handing_out.pass_by(order.lookahead, order.reload_ahead, index)
            self._num_passed += 1

    def fetch(self, index: int, layout: Layout) -> torch.Tensor:
        """Saved tensor `index`, which has a record, in that geometry. Waits only if its bytes are not in memory.

        Raises what `TierStore.get` raises."""
        if self.started and not self.large_nodes:
            self.asked[index] = None  # as `asked_for`, without its call
        else:
            self.asked_for(index)
        record = self.records[index]
        if record is None:
            raise RuntimeError(f"saved tensor {index} is not registered")
        member, order = None, self.order
        if index in self.members:
            member = self.members[index]
            if member.counter._version != member.version:
                raise ModifiedInPlaceError(describe(layout), member.version, member.counter._version, name_of_node())
            if order.is_followed:
                view = self.residency.handing_out.next_member(record, member, layout, order.lookahead, index)
                if view is not None:
                    return view
        if not order.is_followed:
            if record.state is State.PENDING:
                return self.residency.handing_out.fetch(record, layout, index=index, member=member)
            self.look_ahead()
        return self.residency.handing_out.fetch(record, layout, order.lookahead, order.reload_ahead, index, member)

    def give(self, index: int, layout: Layout) -> torch.Tensor:
        """Saved tensor `index`, for a traced graph: tracked or not, in that geometry, which has no lazy bits."""
        tracked: Any = self.find(index)
        return self.fetch(index, layout) if tracked is None else alias_of(tracked.unpack(), tracked.layout)

    def start(self, index: int) -> None:
        ended_with = self.ended_with
        if ended_with is not None:
            if ended_with.num_packs == self.num_packs and self.is_on_device():
                self._whole_graphs.saw(self.packs, ended_with)
            else:
                self._whole_graphs.begin_again(nodes_of(self.packs))
        super().start(index)
        packs = self.copied_packs()
        self.large_nodes = large_nodes(zip(packs.nodes, packs.storages, packs.sizes, strict=True), self._region_bytes)


def open_log(store: TierStore, options: LogOptions) -> PackLog:
    """The log that this thread packs into next: as a rule the one that it packed into last, with the same options."""
    log = current_log(store, options)
    if log is None:
        logs = _logs_of_thread(store)
        for other in [other for other, reference in logs.items() if reference() is None]:
            del logs[other]
        log = PackLog(store, options)
        logs[options] = weakref.ref(log)
    return log


def current_log(store: TierStore, options: LogOptions) -> PackLog | None:
    """The log that this thread packed into last, with the same options; None: a new one begins.

    A model whose blocks have a scope each is one graph, and so one log. A new log begins where that one is gone, where
    backward has begun on it, and where most of what it holds is dead: its graphs were dropped without a backward."""
    logs = _logs_of_thread(store)
    reference = logs.get(options)
    log = None if reference is None else reference()
    if log is None or log.started or log.is_mostly_dead():
        logs.pop(options, None)
        return None
    return log


def _logs_of_thread(store: TierStore) -> dict[LogOptions, weakref.ref[PackLog]]:
    logs: dict[LogOptions, weakref.ref[PackLog]] = store._core.of_thread.__dict__.setdefault("logs", {})
    return logs

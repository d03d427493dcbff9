"""What is known of one graph while it is packed, and what backward will ask for next. Pure.

In forward, each pack is compared with the graphs that are known, and the plan of the one that fits is followed. When
backward begins, the lookahead follows the order of that graph's last backward, or the reverse-topological one. What
backward asked for is learned when the graph is gone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple

from .lookahead import LearnedOrders, Lookahead, PrefetchDepth, reverse_topological
from .plan import Plan, Trace
from .record import R
from .state import State


class Budgets(NamedTuple):
    """How much stays where. `device_bytes`: None: it is found, see NOTE [What compute covers] in `coverage.py`."""

    host_bytes: int
    device_bytes: int | None
    staging_bytes: int


class Packs(NamedTuple, Generic[R]):
    """The packs of a graph, in order: lists of the same length.

    `sizes`: bytes of each tensor's storage. `records`: None while a tensor is only tracked. `storages`: a number for
    each storage: packs of one storage have the same, unless they are dead. `on_device`: whether it is on an
    accelerator."""

    nodes: Sequence[int]
    sizes: Sequence[int]
    records: Sequence[R | None]
    storages: Sequence[int]
    on_device: Sequence[bool]


class _TraceSoFar(NamedTuple):
    """A `Trace`, as far as it is known when backward begins: all but the order."""

    signatures: Sequence[int]
    records: Sequence[int]
    sizes: Sequence[int]
    on_device: Sequence[int]
    shapes: Sequence[int]
    storage_bytes: Sequence[int]


class GraphOrder(Generic[R]):
    """The order of one graph. Guarded by the thread that packs, and then by the one that runs backward.

    Args:
        orders: the orders that are known, to learn and to recall; None: the reverse-topological order is followed.
        budgets: for the plan.
        lookahead_bytes: how far ahead of backward to fetch; None: `depth_bytes` at most, see NOTE [No farther than it
            takes] in `lookahead.py`.

    Attributes:
        lookahead: what backward will ask for next, to be read from disk.
        reload_ahead: likewise, to be copied from host memory to its accelerator.
        asked_for: the packs that backward has asked for, in order; an ordered set.
        predicted: the plan of the latest known graph that begins with the packs so far; None: there is none.
        is_followed: something has left its place, and backward has begun: the lookahead is followed.
        is_whole: all packs of the graph are known, so that something can be learned from it.
    """

    def __init__(
        self, orders: LearnedOrders | None, budgets: Budgets, lookahead_bytes: int | None, depth_bytes: int
    ) -> None:
        self._orders = orders
        self._budgets = budgets
        self._finds_depth = lookahead_bytes is None
        self.lookahead = Lookahead[R](depth_bytes if lookahead_bytes is None else lookahead_bytes)
        self.reload_ahead = Lookahead[R](0 if lookahead_bytes == 0 else sys.maxsize)  # the device's windows bound it
        self.asked_for: dict[int, None] = {}
        self.predicted: Plan | None = None
        self._signature = 0  # of the packs so far, as long as there is a plan
        self._shape = 0  # of their nodes, where the plan does not tell it
        self.is_followed = False
        self.is_whole = True
        self._trace: _TraceSoFar | None = None

    def follow(self, index: int, packs: Sequence[tuple[int, int]], first_node: int) -> int:
        """Compare packs, (node, bytes) each and the first of them pack `index`, with the graphs that are known. Where
        one is not as predicted, `predicted` is made anew. Returns how many are before that one, or how many there are.

        To be called for the first pack, and for each next one as long as there is a plan."""
        predicted, num_alike = self.predicted, 0
        is_exact = predicted is not None and predicted.scale is None
        known: Sequence[int] = ()
        if predicted is not None:
            known = predicted.trace.signatures if is_exact else predicted.trace.shapes
        num_known = len(known)
        for node, nbytes in packs:
            number = index + num_alike
            self._signature = mine = hash((self._signature, node - first_node, nbytes))
            if not is_exact:
                self._shape = mine = hash((self._shape, node - first_node))
            if number >= num_known or known[number] != mine:
                if predicted is not None and is_exact:  # so far their nodes were the same
                    self._shape = hash((predicted.trace.shapes[number - 1] if number else 0, node - first_node))
                self.predicted = self._predict(number + 1, nbytes)
                break
            num_alike += 1
        return num_alike

    def _predict(self, num_packs: int, nbytes: int) -> Plan | None:
        orders, budgets = self._orders, self._budgets
        if orders is None:
            return None
        return orders.predict(num_packs, self._signature, *budgets) or orders.predict_alike(
            num_packs, self._shape, nbytes, *budgets
        )

    @property
    def plan(self) -> Plan | None:
        """The plan to follow; None: nothing is predicted, or all of it stays where it is."""
        return self.predicted if self.predicted is not None and self.predicted.is_needed else None

    def come_in(self, indices: Sequence[int], record: R) -> None:
        """Those packs, which had no record until now, have one."""
        if self.is_followed:
            self.lookahead.come_in(indices, record)
            self.reload_ahead.come_in(indices, record)

    def look_ahead(self, packs: Packs[R], records: Sequence[R | None]) -> None:
        """Something has left its place: from now on, bring back what backward will ask for before it asks.

        `records`: the log's own list, in which records may still come in; it may be longer than `packs`."""
        signatures = _signatures(packs.nodes, packs.sizes)
        known = None if self._orders is None else self._orders.recall(signatures[-1])
        shapes = _shapes(packs.nodes) if known is None else known.shapes
        alike = known
        if self._orders is not None and known is None:
            alike = self._orders.recall_alike(len(shapes), shapes[-1])
        order = reverse_topological(packs.nodes) if alike is None else alike.order
        self.lookahead.begin(records, order)
        self.reload_ahead.begin(records, order)
        self._trace = trace = _trace_so_far(packs, signatures, shapes, known)
        self.is_followed = True
        if self._orders is not None and self._finds_depth and not any(trace.on_device):
            # ahead of an accelerator, the host waits in any case
            self.lookahead.depth.is_far = not self._orders.depths.is_near(signatures[-1])

    def ending(self, times: Any) -> Callable[[], None] | None:
        """What learns from this backward, to be called when the graph is gone. It keeps no record. None: nothing does.

        `times`: of the graph on its accelerator; None: they were not taken."""
        if self._orders is None or self._trace is None or not self.is_whole:
            return None
        depth, staging_bytes = self.lookahead.depth, self._budgets.staging_bytes
        return partial(_learn, self._orders, self._trace, self.asked_for, times, depth, staging_bytes)


def _trace_so_far(
    packs: Packs[R], signatures: Sequence[int], shapes: Sequence[int], known: Trace | None
) -> _TraceSoFar:
    """The trace of this graph, but for the order. `known`: a trace of the same packs, if there is one."""
    pending = State.PENDING  # `shared` tells something in this state alone
    is_kept = [record is not None and record.state is pending and record.shared for record in packs.records]
    sizes = [0 if kept else nbytes for nbytes, kept in zip(packs.sizes, is_kept, strict=True)]
    if known is not None:
        return _TraceSoFar(known.signatures, known.records, sizes, known.on_device, shapes, packs.sizes)
    first: dict[int, int] = {}
    indices = [first.setdefault(storage, index) for index, storage in enumerate(packs.storages)]
    return _TraceSoFar(signatures, indices, sizes, packs.on_device, shapes, packs.sizes)


def _signatures(nodes: Sequence[int], sizes: Sequence[int]) -> list[int]:
    signature = 0
    return [signature := hash((signature, node - nodes[0], nbytes)) for node, nbytes in zip(nodes, sizes, strict=True)]


def _shapes(nodes: Sequence[int]) -> list[int]:
    shape = 0
    return [shape := hash((shape, node - nodes[0])) for node in nodes]


def _learn(
    orders: LearnedOrders,
    trace: _TraceSoFar,
    asked_for: Iterable[int],
    times: Any,
    depth: PrefetchDepth,
    staging_bytes: int,
) -> None:
    """A graph is gone: learn in which order its backward asked, how fast, and how long it waited for copies."""
    signature = trace.signatures[-1]
    num_packs = len(trace.signatures)  # another thread may have packed more since
    order = [index for index in asked_for if index < num_packs]
    learned = Trace(
        trace.signatures, trace.records, trace.sizes, trace.on_device, order, trace.shapes, trace.storage_bytes
    )
    orders.learn(learned)
    orders.depths.note(signature, depth, staging_bytes)
    if times is not None:
        orders.coverage.note(learned.measurable, times)

"""What backward will ask for next. Pure: an order over indices, learned or derived, and a position in it.

Backward visits the nodes of a graph in the reverse of the order in which forward made them. It asks for the tensors of
one node in the order in which they were saved. (Autograd numbers its nodes; the number at pack tells the node.) Where
branches meet, this is only nearly true. So the order that was seen is kept, and is followed the next time that the same
sequence of saved tensors comes along. Either order is a guess: if it is wrong, it costs time and nothing else.

NOTE [No farther than it takes]
Reading earlier than necessary gains no time, and the bytes need room: in the staging window (*near*), or also in the
part of the host budget that backward has freed (*far*). There they take fresh pages, which the kernel clears, and which
the host of a virtual machine may have to find first.

The last backward of the same graph shows whether near is enough: how many bytes backward asked for while one read was
under way. If that was never more than the staging window holds, a read that begins as soon as staging has room comes in
time, so the next backward reads near. It reads far if that was more, if backward had to wait for the disk, or if
nothing is known: a drive that just keeps up must never be idle, least of all while backward uses the bytes that stayed.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic

from .coverage import Coverage
from .plan import Plan, TierBudgets, Trace
from .prefixes import Prefixes
from .record import R

Signature = int
"""A hash of a sequence of packs: their sizes and nodes, in order."""

_MAX_TRACES = 64
_MAX_PACKS = 2**18
"""Limit for the packs of all traces together: some ten megabytes."""
_MAX_NEAR = 64
"""Graphs for which near is known to be enough."""
_MAX_PLANS = 4 * _MAX_TRACES
"""One graph has several where budgets change."""


def reverse_topological(nodes: Sequence[int]) -> list[int]:
    """The expected order of unpacks, as indices of packs; `nodes[i]` is the node that saved tensor i."""
    return sorted(range(len(nodes)), key=lambda index: (-nodes[index], index))


class LearnedOrders:
    """The traces seen, by the signature of all their packs; the least recently used are forgotten.

    Any thread may call it: what is known is replaced as a whole. Of two that learn at once, one may learn in vain."""

    def __init__(self) -> None:
        self._known = _Known(Prefixes())
        self._uses = itertools.count(1)
        self.coverage = Coverage()
        self.depths = PrefetchDepths()

    def learn(self, trace: Trace) -> None:
        """Remember a trace, unless its order is only the beginning of the known order of the same packs."""
        signature, prefixes = trace.signatures[-1], self._known.prefixes
        known = prefixes.traces.get(signature)
        if known is not None and (trace == known or trace.ends_within(known)):
            known.last_used = next(self._uses)
            return
        if known is not None:
            prefixes = prefixes.without(signature)
        prefixes = prefixes.with_trace(trace)
        trace.last_used = next(self._uses)
        while len(traces := prefixes.traces) > _MAX_TRACES or (
            len(traces) > 1 and sum(map(len, traces.values())) > _MAX_PACKS
        ):
            prefixes = prefixes.without(min(traces, key=lambda whole: traces[whole].last_used))
        self._known = _Known(prefixes)

    def recall(self, signature: Signature) -> Trace | None:
        trace = self._known.prefixes.traces.get(signature)
        if trace is not None:
            trace.last_used = next(self._uses)
        return trace

    def predict(
        self, num_packs: int, signature: Signature, host_bytes: int, device_bytes: int | None, staging_bytes: int = 0
    ) -> Plan | None:
        """The plan of the latest trace that begins with these `num_packs` packs; None: no known trace does.

        Where other known traces differ, which may come instead, it decides nothing.

        `device_bytes`: what may stay on the accelerator; None: of each trace as much as `coverage` has found for it."""
        known, coverage = self._known, self.coverage
        traces = known.prefixes.beginning(num_packs, signature)
        if not traces:
            return None
        latest = max(traces, key=lambda whole: traces[whole].last_used)

        def budgets(whole: Signature) -> TierBudgets:
            trace = known.prefixes.traces[whole]
            staying_bytes = coverage.staying_bytes(trace.measurable) if device_bytes is None else device_bytes
            return TierBudgets(host_bytes, staying_bytes, staging_bytes)

        found = coverage.num_found() if device_bytes is None else 0
        return known.plan(latest, (host_bytes, device_bytes, staging_bytes, found), budgets)

    def predict_alike(
        self,
        num_packs: int,
        shape: Signature,
        nbytes: int,
        host_bytes: int,
        device_bytes: int | None,
        staging_bytes: int,
    ) -> Plan | None:
        """The plan of the latest trace that begins with packs of the same nodes; None: there is none.

        What stays where is the same share of the bytes. `nbytes`: those of the latest pack, which tell the scale."""
        traces = self._alike(num_packs, shape)
        if not traces:
            return None
        trace = max(traces, key=lambda trace: trace.last_used)
        known_bytes = trace.storage_bytes[num_packs - 1]
        scale = nbytes / known_bytes if known_bytes and nbytes else 1.0
        staying_bytes = self.coverage.staying_bytes(trace.measurable, scale) if device_bytes is None else device_bytes
        budgets = TierBudgets(int(host_bytes / scale), int(staying_bytes / scale), int(staging_bytes / scale))
        tiers = trace.tiers(budgets)
        return Plan(trace, lambda index, part: (0, tiers), is_needed=trace.exceeds(budgets), scale=scale)

    def recall_alike(self, num_packs: int, shape: Signature) -> Trace | None:
        """The latest trace of as many packs of the same nodes."""
        traces = [trace for trace in self._alike(num_packs, shape) if len(trace) == num_packs]
        return max(traces, key=lambda trace: trace.last_used, default=None)

    def _alike(self, num_packs: int, shape: Signature) -> list[Trace]:
        traces = self._known.prefixes.traces.values()
        return [each for each in traces if num_packs <= len(each.shapes) and each.shapes[num_packs - 1] == shape]


class _Known:
    """What is known at one time, and the plans that were made of it."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.prefixes = prefixes
        self._plans: dict[Hashable, Plan] = {}

    def plan(self, whole: Signature, key: Hashable, budgets: Callable[[Signature], TierBudgets]) -> Plan:
        """The plan of the trace with that signature. `budgets`: those of each trace; `key` stands for them all."""
        plan = self._plans.get((whole, key))
        if plan is not None:
            return plan
        trace = self.prefixes.traces[whole]

        def tiers_of(each: Signature, of: Trace) -> bytes:
            return of.tiers(budgets(each))

        def agreed(index: int, part: int) -> tuple[int, bytes]:
            start, stretch = self.prefixes.stretch_with(trace, index, part)
            return start, stretch.agreed(start, key, tiers_of)

        if len(self._plans) >= _MAX_PLANS:
            self._plans = {}
        plan = self._plans[whole, key] = Plan(trace, agreed, is_needed=trace.exceeds(budgets(whole)))
        return plan


class PrefetchDepth:
    """The prefetch depth of one backward, and the figures from which the next one's is found.

    Attributes:
        is_far: bytes that are fetched ahead may take room of both windows; else of staging alone.
        has_waited: backward has waited for bytes on disk.
        most_bytes: the most bytes that backward asked for while one read was under way.
        asked_bytes: how many it has asked for so far.
    """

    def __init__(self) -> None:
        self.is_far = True
        self.has_waited = False
        self.most_bytes = 0
        self.asked_bytes = 0
        self._began_at: dict[int, int] = {}  # by the record's key: bytes asked for when its read began

    def wait(self) -> None:
        """Note that backward waits for bytes on disk; from now on it is fetched far ahead."""
        self.is_far = self.has_waited = True

    def read_began(self, key: int) -> None:
        self._began_at[key] = self.asked_bytes

    def read_ended(self, key: int) -> None:
        """Note that the record's read has ended; without effect if it was not read for this backward."""
        began_at = self._began_at.pop(key, self.asked_bytes)
        self.most_bytes = max(self.most_bytes, self.asked_bytes - began_at)


class PrefetchDepths:
    """The graphs, by signature, for which near is enough. Any thread: it uses single operations on a dictionary."""

    def __init__(self) -> None:
        self._near: OrderedDict[int, None] = OrderedDict()

    def is_near(self, signature: int) -> bool:
        return signature in self._near

    def note(self, signature: int, depth: PrefetchDepth, staging_bytes: int) -> None:
        if depth.has_waited or depth.most_bytes > staging_bytes:
            self._near.pop(signature, None)
            return
        self._near[signature] = None
        while len(self._near) > _MAX_NEAR:
            try:
                self._near.popitem(last=False)
            except KeyError:
                pass  # another thread was quicker


class Lookahead(Generic[R]):
    """A position in the order of one graph, and what lies ahead of it within a number of bytes.

    `limit_bytes`: how many may be fetched ahead and not asked for yet; 0: look ahead not at all. `depth`: into which
    windows."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.depth = PrefetchDepth()
        self._records: Sequence[R | None] = ()
        self._order: Sequence[int] = ()
        self._end = 0  # its length
        self._rank: list[int] = []  # by index: its rank in the order; -1: it is not in the order
        self._num_known = 0  # length of `_rank`
        self._asked = bytearray()  # by index: whether it was asked for
        self._ranks_by_key: dict[int, list[int]] | None = None  # ranks of the known records; None: not needed yet
        self._position = -1  # rank of the latest that was asked for
        self._next = 0  # rank of the first that was not dealt with yet
        self._ahead: dict[int, int] = {}  # by index: bytes that were fetched ahead and not asked for yet
        self._ahead_bytes = 0

    def begin(self, records: Sequence[R | None], order: Sequence[int]) -> None:
        """Start at the beginning of `order`, the indices in which backward will ask; `records[i]` is pack i's record.

        None in `records`: the tensor is only tracked, so it is in memory; `come_in` enters its record later."""
        self._records, self._order, self._end = records, order, len(order)
        self._num_known = len(records)
        self._rank = [-1] * self._num_known
        self._asked = bytearray(len(records))
        self._ranks_by_key = None
        for rank, index in enumerate(order):
            self._rank[index] = rank

    def come_in(self, indices: Sequence[int], record: R) -> None:
        """Note that the `records` of these indices, which were None until now, have become `record`."""
        known = self._ranks_by_key
        if known is None:
            return
        for index in indices:
            if index < len(self._rank) and self._rank[index] >= 0:
                insort(known.setdefault(record.key, []), self._rank[index])

    def asked_for(self, index: int, nbytes: int = 0, *, knows_dropped: bool = False) -> None:
        """Move the position to saved tensor `index` of `nbytes`, which was asked for.

        If it was asked for before, what follows it lies ahead again: backward may go through a retained graph twice.
        `knows_dropped`: since the last call, `come_back_for` was called for all that has left memory. Then there is
        nothing to look for again until the position goes back, as it does where backward begins anew."""
        self.depth.asked_bytes += nbytes
        if index in self._ahead:
            self._ahead_bytes -= self._ahead.pop(index)
        if index < self._num_known:  # else it was packed on another thread, while backward began
            rank = self._rank[index]
            again, self._asked[index] = self._asked[index], 1
            if rank >= 0:
                again = again and (rank < self._position or not knows_dropped)
                self._position = rank
                if again or rank >= self._next:
                    self._next = rank + 1

    def is_last(self, index: int, record: R) -> bool:
        """Whether pack `index` is the last member of a group that will be asked for, or may be."""
        ranks = self._ranks_of(record)
        return not ranks or index >= self._num_known or ranks[-1] <= self._rank[index]

    def come_back_for(self, record: R) -> None:
        """Note that the record has left memory: if it was dealt with and not asked for yet, go on from it again."""
        for rank in self._ranks_of(record):
            if self._position < rank < self._next:
                self._ahead_bytes -= self._ahead.pop(self._order[rank], 0)
                self._next = rank
                return

    def needs_first(self, record: R) -> bool:
        """Whether the record was the latest asked for, or will be asked for before the one that `peek` names."""
        return any(self._position <= rank < self._next for rank in self._ranks_of(record))

    def is_behind(self, record: R) -> bool:
        """Whether the record will be asked for after the one that was asked for last."""
        ranks = self._ranks_of(record)
        return bool(ranks) and ranks[-1] > self._position

    def next_rank(self, record: R) -> float:
        """The rank in the order at which the record is asked for now or will be next; infinite: not again."""
        return next((rank for rank in self._ranks_of(record) if rank >= self._position), math.inf)

    def peek(self) -> R | None:
        """The next record to fetch; None: far enough, or nothing left."""
        if self._ahead_bytes >= self._limit_bytes:
            return None
        while self._next < self._end:
            record = self._records[self._order[self._next]]
            if record is not None:
                return record
            self._next += 1
        return None

    def advance(self, fetched_bytes: int) -> None:
        """Go past the record that `peek` named; `fetched_bytes` are being fetched for it."""
        order, records, rank = self._order, self._records, self._next
        index = order[rank]
        if fetched_bytes:
            self._ahead_bytes += fetched_bytes - self._ahead.get(index, 0)
            self._ahead[index] = fetched_bytes
        rank, end, record = rank + 1, self._end, records[index]
        while rank < end and records[order[rank]] is record:  # further members of the same group
            rank += 1
        self._next = rank

    def give_up(self) -> None:
        self._limit_bytes = 0

    def _ranks_of(self, record: R) -> Sequence[int]:
        known = self._known_ranks() if self._ranks_by_key is None else self._ranks_by_key
        return known.get(record.key, ())

    def _known_ranks(self) -> dict[int, list[int]]:
        known = self._ranks_by_key = {}
        for rank, index in enumerate(self._order):
            ahead = self._records[index]
            if ahead is not None:
                known.setdefault(ahead.key, []).append(rank)
        return known

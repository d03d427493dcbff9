"""What backward will ask for next. Pure: an order over indices, learned or derived, and a position in it.

Backward visits the nodes of a graph in the reverse of the order in which forward made them. It asks for the tensors of
one node in the order in which they were saved. (Autograd numbers its nodes; the number at pack tells the node.) Where
branches meet, this is only nearly true. So the order that was seen is kept, and is followed the next time that the same
sequence of saved tensors comes along. Either order is a guess: if it is wrong, it costs time and nothing else."""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic

from .coverage import Coverage
from .plan import Plan, Trace, make_plan
from .prefetch_depth import PrefetchDepth, PrefetchDepths
from .record import R

Signature = int
"""A hash of a sequence of packs: their sizes and nodes, in order."""

_MAX_TRACES = 64
_MAX_PACKS = 2**18
"""Limit for the packs of all traces together: some ten megabytes."""


def reverse_topological(nodes: Sequence[int]) -> list[int]:
    """The expected order of unpacks, as indices of packs; `nodes[i]` is the node that saved tensor i."""
    return sorted(range(len(nodes)), key=lambda index: (-nodes[index], index))


class LearnedOrders:
    """The traces seen, by the signature of all their packs; the least recently used are forgotten.

    Any thread may call it: it uses single operations on dictionaries only."""

    def __init__(self) -> None:
        self._traces: OrderedDict[Signature, Trace] = OrderedDict()
        self._plans: dict[tuple[Signature, int, int, int], Plan] = {}
        self.coverage = Coverage()
        self.depths = PrefetchDepths()

    def learn(self, trace: Trace) -> None:
        """Remember a trace, unless its order is only the beginning of the known order of the same packs."""
        signature = trace.signatures[-1]
        known = self._traces.get(signature)
        if known is None or not (trace == known or trace.ends_within(known)):
            self._traces[signature] = trace
            self._plans = {}
        self._touch(signature)
        while len(traces := list(self._traces.values())) > _MAX_TRACES or (
            len(traces) > 1 and sum(map(len, traces)) > _MAX_PACKS
        ):
            try:
                self._traces.popitem(last=False)
            except KeyError:
                pass  # another thread was quicker
            self._plans = {}

    def recall(self, signature: Signature) -> Trace | None:
        self._touch(signature)
        return self._traces.get(signature)

    def predict(
        self, num_packs: int, signature: Signature, host_bytes: int, device_bytes: int | None, staging_bytes: int = 0
    ) -> Plan | None:
        """The plan of the latest trace that begins with these `num_packs` packs; None: no known trace does.

        `device_bytes`: what may stay on the accelerator; None: as much as `coverage` has found for that trace."""
        traces = list(self._traces.items())
        for whole, trace in reversed(traces):
            if trace.continues(num_packs, signature):
                staying_bytes = self.coverage.staying_bytes(whole) if device_bytes is None else device_bytes
                key = whole, host_bytes, staying_bytes, staging_bytes
                plan = self._plans.get(key)
                if plan is None:
                    others = [other for other_whole, other in traces if other_whole != whole]
                    plan = self._plans[key] = make_plan(trace, others, *key[1:])
                return plan
        return None

    def _touch(self, signature: Signature) -> None:
        try:
            self._traces.move_to_end(signature)
        except KeyError:
            pass  # another thread has just removed it


class Lookahead(Generic[R]):
    """A position in the order of one graph, and what lies ahead of it within a number of bytes.

    `limit_bytes`: how many may be fetched ahead and not asked for yet; 0: look ahead not at all. `depth`: into which
    windows."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.depth = PrefetchDepth()
        self._records: Sequence[R | None] = ()
        self._order: Sequence[int] = ()
        self._rank: list[int] = []  # by index: its rank in the order; -1: it is not in the order
        self._num_known = 0  # its length
        self._asked = bytearray()  # by index: whether it was asked for
        self._ranks_by_key: dict[int, list[int]] | None = None  # ranks of the known records; None: not needed yet
        self._position = -1  # rank of the latest that was asked for
        self._next = 0  # rank of the first that was not dealt with yet
        self._ahead: dict[int, int] = {}  # by index: bytes that were fetched ahead and not asked for yet
        self._ahead_bytes = 0

    def begin(self, records: Sequence[R | None], order: Sequence[int]) -> None:
        """Start at the beginning of `order`, the indices in which backward will ask; `records[i]` is pack i's record.

        None in `records`: the tensor is only tracked, so it is in memory; `come_in` enters its record later."""
        self._records, self._order = records, order
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

    def asked_for(self, index: int, nbytes: int = 0) -> None:
        """Move the position to saved tensor `index` of `nbytes`, which was asked for.

        If it was asked for before, what follows it lies ahead again: backward may go through a retained graph twice."""
        self.depth.asked_bytes += nbytes
        if index in self._ahead:
            self._ahead_bytes -= self._ahead.pop(index)
        if index < self._num_known:  # else it was packed on another thread, while backward began
            rank = self._rank[index]
            again, self._asked[index] = self._asked[index], 1
            if rank >= 0:
                self._position = rank
                if again or rank >= self._next:
                    self._next = rank + 1

    def pass_member(self, index: int, record: R) -> bool:
        """Move the position to a member of a group. False: it is the last one, or may be, and nothing was changed."""
        known = self._known_ranks() if self._ranks_by_key is None else self._ranks_by_key
        if record.key not in known or index >= self._num_known or known[record.key][-1] <= self._rank[index]:
            return False
        self.asked_for(index, record.nbytes // record.num_members)
        return True

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
        while self._next < len(self._order):
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
        rank, end, record = rank + 1, len(order), records[index]
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

"""What backward will ask for next. Pure: an order over indices, learned or derived, and a position in it.

Backward visits the nodes of a graph in the reverse of the order in which forward made them; the tensors of one node
it asks for in the order in which they were saved (autograd numbers its nodes; the number at pack marks the node).
Where branches meet, that is only nearly true, so the order that was seen is kept: the next time the same sequence
of saved tensors comes along, it is followed instead. Either way it is a guess that costs time when wrong, nothing
else.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from .coverage import Coverage
from .plan import Plan, Trace, make_plan
from .reach import Reach, Reaches

__all__ = ["Keyed", "LearnedOrders", "Lookahead", "reverse_topological"]


class Keyed(Protocol):
    """What is asked for: a `Record`, or a simulated one."""

    key: int


R = TypeVar("R", bound=Keyed)

Signature = int
"""Stands for a sequence of packs: which sizes, at which nodes, in which order."""

_MAX_TRACES = 64
_MAX_PACKS = 2**18
"""Of all traces together: some ten megabytes."""


def reverse_topological(nodes: Sequence[int]) -> list[int]:
    """The order of unpacks to expect, as indices of packs, where `nodes[i]` is the node that saved tensor i."""
    return sorted(range(len(nodes)), key=lambda index: (-nodes[index], index))


class LearnedOrders:
    """The traces seen, by signature of all their packs; the least recently used are forgotten.

    Single operations on dictionaries, so any thread may call it.

    Attributes:
        coverage: what of each graph has to stay on the accelerator, where that is to be found.
        reaches: which of them need not be fetched from afar.
    """

    def __init__(self) -> None:
        self._traces: OrderedDict[Signature, Trace] = OrderedDict()
        self._plans: dict[tuple[Signature, int, int, int], Plan] = {}
        self.coverage = Coverage()
        self.reaches = Reaches()

    def learn(self, trace: Trace) -> None:
        """Remember a trace. One that ends in the midst of what is known of the same packs adds nothing."""
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
        """What was seen of such packs, None where nothing was."""
        self._touch(signature)
        return self._traces.get(signature)

    def predict(
        self, num_packs: int, signature: Signature, host_bytes: int, device_bytes: int | None, staging_bytes: int = 0
    ) -> Plan | None:
        """What to expect after so many packs: the plan of the trace seen last that begins with them; None: nothing.

        `device_bytes`: None: what of that trace compute does not cover.
        """
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
            pass  # just forgotten on another thread


class Lookahead(Generic[R]):
    """A position in the order of one graph, and what lies ahead of it within a number of bytes.

    Args:
        limit_bytes: how far to look ahead of what was asked for last; 0: not at all.

    Attributes:
        reach: in which room what is fetched may lie.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.reach = Reach()
        self._records: Sequence[R | None] = ()
        self._order: Sequence[int] = ()
        self._rank: list[int] = []  # of each index in the order
        self._asked = bytearray()  # of each index: whether it was asked for
        self._ranks_by_key: dict[int, list[int]] | None = None  # of the known records; None: not needed yet
        self._position = -1  # rank of what was asked for last
        self._next = 0  # rank of the first that was not looked at
        self._ahead: dict[int, int] = {}  # bytes that were fetched ahead and not asked for yet, by index
        self._ahead_bytes = 0

    def begin(self, records: Sequence[R | None], order: Sequence[int]) -> None:
        """Backward begins: `records[i]` was packed as number i; those named in `order` will be asked for in turn.

        Where there is None, the tensor has never left its place; `come_in` tells when a record has come in.
        """
        self._records, self._order = records, order
        self._rank = [-1] * len(records)
        self._asked = bytearray(len(records))
        self._ranks_by_key = None
        for rank, index in enumerate(order):
            self._rank[index] = rank

    def come_in(self, index: int, record: R) -> None:
        """`records[index]`, until now None, is that record."""
        known = self._ranks_by_key
        if known is not None and index < len(self._rank) and self._rank[index] >= 0:
            insort(known.setdefault(record.key, []), self._rank[index])

    def asked_for(self, index: int) -> None:
        """Saved tensor `index` was asked for: the position moves there, back too if it was asked for before.

        Backward goes through a graph again where it is retained.
        """
        self._ahead_bytes -= self._ahead.pop(index, 0)
        if index < len(self._rank):  # else it was packed on another thread, while backward began
            rank = self._rank[index]
            again, self._asked[index] = self._asked[index], 1
            if rank >= 0:
                self._position = rank
                self._next = rank + 1 if again else max(self._next, rank + 1)

    def come_back_for(self, record: R) -> None:
        """The record has left memory: if it was dealt with, and is still to be asked for, that was in vain."""
        for rank in self._ranks_of(record):
            if self._position < rank < self._next:
                self._ahead_bytes -= self._ahead.pop(self._order[rank], 0)
                self._next = rank
                return

    def needs_first(self, record: R) -> bool:
        """Whether the record is asked for just now, or will be before the one that `peek` names."""
        return any(self._position <= rank < self._next for rank in self._ranks_of(record))

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
        """The record that `peek` named was dealt with; so many bytes are being fetched for it."""
        if fetched_bytes:
            index = self._order[self._next]
            self._ahead_bytes += fetched_bytes - self._ahead.get(index, 0)
            self._ahead[index] = fetched_bytes
        self._next += 1

    def give_up(self) -> None:
        """There is no room for anything that is not asked for: look no further ahead."""
        self._limit_bytes = 0

    def _ranks_of(self, record: R) -> Sequence[int]:
        known = self._ranks_by_key
        if known is None:
            known = self._ranks_by_key = {}
            for rank, index in enumerate(self._order):
                ahead = self._records[index]
                if ahead is not None:
                    known.setdefault(ahead.key, []).append(rank)
        return known.get(record.key, ())

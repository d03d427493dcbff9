"""Where the saved tensors of a graph should be kept, known from its last run. Pure: numbers in and out.

In the order in which backward asks:
1. As many tensors as the budgets hold stay on the accelerator and in host memory.
2. As many of the next as the staging window holds leave only when they must. They are then still on their way when
   backward begins, and are handed over from memory. Sent early, they would just have reached the disk, and would be
   read back at once, behind the last writes.
3. The rest goes to disk as soon as the store is its sole owner, not only when the budget is full. So the drive has all
   of forward to write it, and backward to read it.

NOTE [Before the graph is known]
The plan is followed while forward still runs, when several known graphs may begin with the packs so far. Then only the
tensors that all of these graphs send away leave early. So nothing is written in vain, whichever graph it turns out to
be. At the first pack that continues no known graph, the plan is dropped."""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .record import RuledRecord


class PlannedTier(enum.Enum):
    """Where a record waits for backward."""

    DEVICE = "device"
    HOST = "host"
    STAGING = "staging"
    DISK = "disk"


_OFF_DEVICE = frozenset({PlannedTier.HOST, PlannedTier.DISK})


class Trace:
    """The packs of one graph, and the order in which backward asked for them.

    Args:
        signatures: for each pack, the signature of the packs up to and including it: the hash of (the one before, or 0;
            the number of its node, counted from the first node; its bytes).
        records: for each pack, the index of the first pack of the same record.
        sizes: for each pack, the record's bytes; 0: somebody else kept them, the store had nothing to do.
        on_device: for each pack, whether the record is on an accelerator.
        order: the unpacks in order, as indices of packs, each once.
    """

    def __init__(
        self,
        signatures: Iterable[int],
        records: Iterable[int],
        sizes: Iterable[int],
        on_device: Iterable[int],
        order: Iterable[int],
    ) -> None:
        self.signatures = array("q", signatures)
        self.records = array("q", records)
        self.sizes = array("q", sizes)
        self.on_device = bytes(on_device)
        self.order = array("q", order)

    def __len__(self) -> int:
        return len(self.signatures)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self._parts() == other._parts()

    __hash__ = None  # type: ignore[assignment]

    def _parts(self) -> tuple[object, ...]:
        return self.signatures, self.records, self.sizes, self.on_device, self.order

    def continues(self, num_packs: int, signature: int) -> bool:
        return num_packs <= len(self.signatures) and self.signatures[num_packs - 1] == signature

    def ends_within(self, other: Trace) -> bool:
        """Whether its order of unpacks is a shorter beginning of the other's."""
        return len(self.order) < len(other.order) and other.order[: len(self.order)] == self.order

    def length_in_common(self, other: Trace) -> int:
        """The number of packs that both begin with. Bisection finds it: a signature stands for all packs up to it."""
        return bisect_left(
            range(min(len(self), len(other))), 1, key=lambda i: self.signatures[i] != other.signatures[i]
        )


class Plan:
    """Where the record of each pack of a trace belongs.

    Attributes:
        priorities: for each pack, at most the number of packs; the higher, the sooner needed. The lowest leaves first.
        tiers: for each pack; None: not decided, the record leaves when it has to.
        is_needed: the records are more than the budgets hold.
    """

    def __init__(
        self, trace: Trace, priorities: Sequence[int], tiers: Sequence[PlannedTier | None], *, is_needed: bool
    ) -> None:
        self.trace = trace
        self.priorities = priorities
        self.tiers = tiers
        self.is_needed = is_needed

    def leaves(self, index: int) -> bool:
        """Whether the record of pack `index` is to leave its device."""
        return index < len(self.tiers) and self.tiers[self.trace.records[index]] in _OFF_DEVICE

    def assign(self, record: RuledRecord, index: int, first_key: int) -> None:
        """Set eviction priority and planned tier of the record of pack `index`. A view of an earlier pack changes
        nothing.

        The priority counts from `first_key`, the key of the graph's first record."""
        if index < len(self.tiers) and self.trace.records[index] == index:
            record.priority = first_key + self.priorities[index]
            record.planned = self.tiers[index]

    def assign_group(self, record: RuledRecord, indices: Iterable[int], first_key: int) -> None:
        """The same for a group: its members have one planned tier. It has the priority of the one needed first."""
        records, tiers, priorities, priority = self.trace.records, self.tiers, self.priorities, 0
        for index in indices:
            if index < len(tiers) and records[index] == index:
                record.planned = tiers[index]
                priority = max(priority, first_key + priorities[index])
        record.priority = priority or record.priority


def make_plan(
    trace: Trace, others: Iterable[Trace], host_bytes: int, device_bytes: int, staging_bytes: int = 0
) -> Plan:
    """Plan the tiers of the records of `trace`.

    Where one of `others`, which may come instead, differs, nothing is decided."""
    tiers = _planned_tiers(trace, host_bytes, device_bytes, staging_bytes)
    leaves_memory = PlannedTier.STAGING in tiers or PlannedTier.DISK in tiers
    is_needed = leaves_memory or (PlannedTier.HOST in tiers and any(trace.on_device))
    for other in others:
        num_packs = trace.length_in_common(other)
        if num_packs:
            theirs = _planned_tiers(other, host_bytes, device_bytes, staging_bytes)
            for index in range(num_packs):
                if theirs[index] is not tiers[index]:
                    tiers[index] = None
    return Plan(trace, _priorities(trace), tiers, is_needed=is_needed)


def _priorities(trace: Trace) -> list[int]:
    """Priorities by the first use; 0 for a record that is never asked for."""
    priorities = [0] * len(trace)
    for rank, index in enumerate(trace.order):
        record = trace.records[index]
        priorities[record] = max(priorities[record], len(trace) - rank)
    return priorities


def _planned_tiers(trace: Trace, host_bytes: int, device_bytes: int, staging_bytes: int) -> list[PlannedTier | None]:
    """Fill device, host and staging in the order of need; the rest goes to disk. None: it is never asked for.

    Records on an accelerator do not wait in staging, because they have to be copied out early."""
    tiers: list[PlannedTier | None] = [None] * len(trace)
    used_device_bytes = used_host_bytes = used_staging_bytes = 0
    for index in trace.order:
        record = trace.records[index]
        size = trace.sizes[record]
        if tiers[record] is not None or not size:
            continue
        if trace.on_device[record] and used_device_bytes + size <= device_bytes:
            used_device_bytes += size
            tiers[record] = PlannedTier.DEVICE
        elif used_host_bytes + size <= host_bytes:
            used_host_bytes += size
            tiers[record] = PlannedTier.HOST
        elif not trace.on_device[record] and used_staging_bytes + size <= staging_bytes:
            used_staging_bytes += size
            tiers[record] = PlannedTier.STAGING
        else:
            tiers[record] = PlannedTier.DISK
    return tiers

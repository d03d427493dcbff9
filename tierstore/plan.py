"""Where the saved tensors of a graph are best kept, known from the last time it came along. Pure: numbers in and out.

What backward asks for first stays: as much of it as the budgets hold. The rest goes to disk as soon as it is ours,
instead of when the budget is full: the drive then has all of forward to write it in, and backward to read it.

What lies between leaves too, but only when it must: as much of what is needed next as the staging window holds. It is
still on its way then when backward begins, and is handed over from memory. Sent early, it had just reached the disk,
and was read back at once, behind the last writes.

NOTE [Before the graph is known]
The plan is followed while forward is still under way, and more than one known graph may begin with what has been packed
so far. Then only what all of them send away goes early: nothing is written that did not have to be if it is another one
of them after all. At the first pack with which no known graph goes on, there is no plan any more.
"""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["Place", "Placed", "Plan", "Trace", "add_pack", "make_plan"]


class Place(enum.Enum):
    """Where a record waits for backward."""

    DEVICE = "device"
    HOST = "host"
    STAGING = "staging"
    DISK = "disk"


class Placed(Protocol):
    """What has a place: a `Record`, or a simulated one. Attributes as `Record`'s."""

    worth: int
    place: Place | None


def add_pack(signature: int, node: int, nbytes: int) -> int:
    """The signature of some packs (0: of none) and one more: by which node, counted from the first, of what size."""
    return hash((signature, node, nbytes))


class Trace:
    """What was packed, and in which order backward asked for it.

    Args:
        signatures: for each pack, what stands for the sequence of packs up to it.
        records: for each pack, the index of the first pack of the same record.
        sizes: for each pack, the record's bytes; 0: somebody else kept them, the store had nothing to do.
        on_device: for each pack, whether the record is on an accelerator.
        order: of the unpacks, as indices of packs, each once.
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
        """Whether it has begun with those packs."""
        return num_packs <= len(self.signatures) and self.signatures[num_packs - 1] == signature

    def ends_within(self, other: Trace) -> bool:
        """Whether backward went the way of the other, but ended before it."""
        return len(self.order) < len(other.order) and other.order[: len(self.order)] == self.order

    def length_in_common(self, other: Trace) -> int:
        """The number of packs with which both begin: each signature stands for all before it, so halving finds it."""
        return bisect_left(
            range(min(len(self), len(other))), 1, key=lambda i: self.signatures[i] != other.signatures[i]
        )


class Plan:
    """For each pack of a trace what is to become of its record.

    Attributes:
        trace: which was seen.
        worths: the higher, the sooner the record is needed, at most the number of packs; the lowest leaves first.
        places: None: nothing is decided, it leaves when it has to.
        is_needed: there is more than the budgets hold.
    """

    def __init__(self, trace: Trace, worths: Sequence[int], places: Sequence[Place | None], *, is_needed: bool) -> None:
        self.trace = trace
        self.worths = worths
        self.places = places
        self.is_needed = is_needed

    def place(self, record: Placed, index: int, first_key: int) -> None:
        """Tell a record where it belongs that was packed as number `index`; a view of an earlier one belongs there.

        Worths count from `first_key`, the key of the graph's first record.
        """
        if index < len(self.places) and self.trace.records[index] == index:
            record.worth = first_key + self.worths[index]
            record.place = self.places[index]


def make_plan(
    trace: Trace, others: Iterable[Trace], host_bytes: int, device_bytes: int, staging_bytes: int = 0
) -> Plan:
    """Place the records of `trace`, unless one of `others`, which may turn out to be the one that comes, objects."""
    places = _places(trace, host_bytes, device_bytes, staging_bytes)
    leaves_memory = Place.STAGING in places or Place.DISK in places
    is_needed = leaves_memory or (Place.HOST in places and any(trace.on_device))
    for other in others:
        num_packs = trace.length_in_common(other)
        if num_packs:
            theirs = _places(other, host_bytes, device_bytes, staging_bytes)
            for index in range(num_packs):
                if theirs[index] is not places[index]:
                    places[index] = None
    return Plan(trace, _worths(trace), places, is_needed=is_needed)


def _worths(trace: Trace) -> list[int]:
    """By the first use; what is never asked for is worth nothing."""
    worths = [0] * len(trace)
    for rank, index in enumerate(trace.order):
        record = trace.records[index]
        worths[record] = max(worths[record], len(trace) - rank)
    return worths


def _places(trace: Trace, host_bytes: int, device_bytes: int, staging_bytes: int) -> list[Place | None]:
    """In the order of need, as much as the device, the host and staging hold; None: it is never asked for.

    What is on an accelerator has to be copied out early, so none of it waits in staging.
    """
    places: list[Place | None] = [None] * len(trace)
    used_device_bytes = used_host_bytes = used_staging_bytes = 0
    for index in trace.order:
        record = trace.records[index]
        size = trace.sizes[record]
        if places[record] is not None or not size:
            continue
        if trace.on_device[record] and used_device_bytes + size <= device_bytes:
            used_device_bytes += size
            places[record] = Place.DEVICE
        elif used_host_bytes + size <= host_bytes:
            used_host_bytes += size
            places[record] = Place.HOST
        elif not trace.on_device[record] and used_staging_bytes + size <= staging_bytes:
            used_staging_bytes += size
            places[record] = Place.STAGING
        else:
            places[record] = Place.DISK
    return places

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
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .coverage import Measurable

if TYPE_CHECKING:
    from .record import RuledRecord


class PlannedTier(enum.Enum):
    """Where a record waits for backward."""

    DEVICE = "device"
    HOST = "host"
    STAGING = "staging"
    DISK = "disk"

    __hash__ = object.__hash__  # as `State`'s


_OFF_DEVICE = frozenset({PlannedTier.HOST, PlannedTier.DISK})
_BITS = {tier: 1 << number for number, tier in enumerate(PlannedTier)}
_TIERS: dict[int, PlannedTier | None] = {0: None} | {bit: tier for tier, bit in _BITS.items()}
_BLOCK_PACKS = 256
_MAX_BUDGETS = 4
"""For as many, a trace remembers its tiers."""


class Trace:
    """The packs of one graph, and the order in which backward asked for them.

    Args:
        signatures: for each pack, the signature of the packs up to and including it: the hash of (the one before, or 0;
            the number of its node, counted from the first node; its bytes).
        records: for each pack, the index of the first pack of the same record.
        sizes: for each pack, the record's bytes; 0: somebody else kept them, the store had nothing to do.
        on_device: for each pack, whether the record is on an accelerator.
        order: the unpacks in order, as indices of packs, each once.
        shapes: for each pack, the signature likewise, but without any bytes.
        storage_bytes: for each pack, the bytes of its storage, whoever keeps them.

    Attributes:
        num_packs: as `len` tells.
        last_used: the higher, the later was it learned or recalled.
    """

    def __init__(
        self,
        signatures: Iterable[int],
        records: Iterable[int],
        sizes: Iterable[int],
        on_device: Iterable[int],
        order: Iterable[int],
        shapes: Iterable[int] = (),
        storage_bytes: Iterable[int] = (),
    ) -> None:
        self.signatures = array("q", signatures)
        self.records = array("q", records)
        self.sizes = array("q", sizes)
        self.on_device = bytes(on_device)
        self.order = array("q", order)
        self.shapes = array("q", shapes)
        self.storage_bytes = array("q", storage_bytes)
        self.num_packs = len(self.signatures)  # each pack looks at it
        self.last_used = 0
        self._tiers: dict[TierBudgets, bytes] = {}

    def __len__(self) -> int:
        return self.num_packs

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

    def length_in_common(self, other: Trace, at_least: int, at_most: int) -> int:
        """The number of packs that both begin with, if it lies between these. Bisection finds it: a signature stands
        for all packs up to it."""
        mine, theirs = self.signatures, other.signatures
        ends = range(at_least, min(at_most, len(self), len(other)))
        return at_least + bisect_left(ends, 1, key=lambda index: mine[index] != theirs[index])

    @cached_property
    def measurable(self) -> Measurable:
        records = {record for record, is_there in zip(self.records, self.on_device, strict=True) if is_there}
        nbytes = sum(self.sizes[record] for record in records)
        return Measurable(self.signatures[-1], self.shapes[-1] if self.shapes else 0, nbytes)

    @cached_property
    def priorities(self) -> array[int]:
        """By pack: by the first use of its record, at most the number of packs; 0: it is never asked for."""
        priorities, records, num_packs = array("q", [0]) * len(self), self.records, len(self)
        for rank, index in enumerate(self.order):
            record = records[index]
            priorities[record] = max(priorities[record], num_packs - rank)
        return priorities

    def tiers(self, budgets: TierBudgets) -> bytes:
        """Where the record of each pack belongs, as a bit for each tier; 0: it is never asked for, or not ours."""
        found = self._tiers.get(budgets)
        if found is None:
            if len(self._tiers) >= _MAX_BUDGETS:
                self._tiers = {}
            found = self._tiers[budgets] = _planned_tiers(self, *budgets)
        return found

    def exceeds(self, budgets: TierBudgets) -> bool:
        """Whether its records are more than the budgets hold."""
        bits = set(self.tiers(budgets))
        leaves_memory = not bits.isdisjoint((_BITS[PlannedTier.STAGING], _BITS[PlannedTier.DISK]))
        return leaves_memory or (_BITS[PlannedTier.HOST] in bits and any(self.on_device))


class TierBudgets(NamedTuple):
    """How much stays where."""

    host_bytes: int
    device_bytes: int
    staging_bytes: int


class Plan:
    """Where the record of each pack of a trace belongs.

    Args:
        agreed: finds the tiers of a part of the packs, as bits, given one of these packs, and a pack before it or equal
            to it, at which a part begins. Returns the first pack of the part, too.
        is_needed: the records are more than the budgets hold.
        scale: None: of the same packs. Else of packs with the same nodes, and so many times the bytes.
    """

    def __init__(
        self,
        trace: Trace,
        agreed: Callable[[int, int], tuple[int, bytes]],
        *,
        is_needed: bool,
        scale: float | None = None,
    ) -> None:
        self.trace = trace
        self.scale = scale
        self.is_needed = is_needed
        self._agreed = agreed
        self._found: tuple[int, int, bytes] = 0, 0, b""  # by `agreed`, the latest, and where it ends
        self._leaving: dict[int, bytes] = {}  # by the number of a block of packs: whether each of them leaves

    def tier(self, index: int) -> PlannedTier | None:
        """The planned tier of the record that pack `index` began; None: not decided, it leaves when it has to."""
        if index >= self.trace.num_packs:
            return None
        start, end, tiers = self._found
        if not start <= index < end:
            start, tiers = self._agreed(index, end if index >= end else 0)
            self._found = start, start + len(tiers), tiers
        return _TIERS[tiers[index - start]]

    def leaves(self, index: int) -> bool:
        """Whether the record of pack `index` is to leave its device."""
        trace = self.trace
        return index < trace.num_packs and self.tier(trace.records[index]) in _OFF_DEVICE

    def num_alike(self, index: int) -> int:
        """How many packs, from that one on, leave their device or stay there as it does; some hundreds at most."""
        number, first = divmod(index, _BLOCK_PACKS)
        block = self._leaving.get(number)
        if block is None:
            packs = range(number * _BLOCK_PACKS, min(self.trace.num_packs, (number + 1) * _BLOCK_PACKS))
            block = self._leaving[number] = bytes(map(self.leaves, packs))
        if first >= len(block):
            return 0
        end = block.find(not block[first], first)
        return (len(block) if end < 0 else end) - first

    def assign(self, record: RuledRecord, index: int, first_key: int) -> None:
        """Set eviction priority and planned tier of the record of pack `index`. A view of an earlier pack changes
        nothing.

        The priority counts from `first_key`, the key of the graph's first record. The lowest leaves first."""
        if index < self.trace.num_packs and self.trace.records[index] == index:
            record.priority = first_key + self.trace.priorities[index]
            start, end, tiers = self._found
            record.planned = _TIERS[tiers[index - start]] if start <= index < end else self.tier(index)  # spares a call

    def assign_group(self, record: RuledRecord, indices: Iterable[int], first_key: int) -> None:
        """The same for a group: its members have one planned tier. It has the priority of the one needed first."""
        trace = self.trace
        known = [index for index in indices if index < trace.num_packs and trace.records[index] == index]
        if known:
            record.planned = self.tier(known[0])
            record.priority = first_key + max([trace.priorities[index] for index in known])


def _planned_tiers(trace: Trace, host_bytes: int, device_bytes: int, staging_bytes: int) -> bytes:
    """Fill device, host and staging in the order of need; the rest goes to disk.

    Records on an accelerator do not wait in staging, because they have to be copied out early."""
    tiers = bytearray(len(trace))
    device, host, staging, disk = _BITS.values()
    records, sizes, on_device = trace.records, trace.sizes, trace.on_device
    for index in trace.order:
        record = records[index]
        size = sizes[record]
        if tiers[record] or not size:
            continue
        if on_device[record] and size <= device_bytes:
            device_bytes -= size
            tiers[record] = device
        elif size <= host_bytes:
            host_bytes -= size
            tiers[record] = host
        elif not on_device[record] and size <= staging_bytes:
            staging_bytes -= size
            tiers[record] = staging
        else:
            tiers[record] = disk
    return bytes(tiers)

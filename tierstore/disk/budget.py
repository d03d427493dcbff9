"""The limits of a tier, pure: the disk budget, and what may be written in a day. Of the budget, segments are counted
whole, and *values* (records that live in the index) at their peak: LMDB keeps the space of deleted ones until its free
pages are given back to the drive."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from .allocator import ALIGNMENT_BYTES, round_up

_MAP_SHARES = 4  # of a map, one for values
_MAP_SPARE_BYTES = 64 * 2**20  # for tables, free lists, and the copies that a transaction makes of pages it changes
_ENTRY_BYTES = 256  # two tables' keys and nodes, a location of at most 90 bytes, pages half full
_IN_LEAF_BYTES = 1024  # a longer value may go to overflow pages of its own (LMDB: about half a page)
_PAGE_HEADER_BYTES = 16
_MOST_MAP_BYTES = 2**42  # of the 2**47 that x86-64 lets a process map; 4 TiB are never filled by small values


def value_charge_bytes(num_bytes: int) -> int:
    """How much a value of this length takes of the disk budget, its index entry included."""
    if num_bytes <= _IN_LEAF_BYTES:
        return 2 * _ENTRY_BYTES + 2 * num_bytes
    return 2 * _ENTRY_BYTES + round_up(num_bytes + _PAGE_HEADER_BYTES)


def map_bytes_for(disk_bytes: int) -> int:
    """The size of a map that records charged against `disk_bytes` cannot fill (on a full map even deletes fail):
    addresses for four times the budget, as LMDB looks for contiguous pages for values, and for extents' entries."""
    return min(round_up(_MAP_SHARES * disk_bytes + _MAP_SPARE_BYTES), _MOST_MAP_BYTES)


class DiskBudget:
    """Counts bytes against one limit; for one loop. `map_bytes`: the length of the index's map. `segment_bytes`,
    `value_bytes`: what they take now. `value_peak_bytes`: the most that values took since `note_given_back`."""

    def __init__(self, limit_bytes: int, map_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._most_value_bytes = map_bytes // _MAP_SHARES
        self.segment_bytes = 0
        self.value_bytes = 0
        self.value_peak_bytes = 0

    @property
    def room_bytes(self) -> int:
        return max(0, self.limit_bytes - self.segment_bytes - self.value_peak_bytes)

    @property
    def kept_bytes(self) -> int:
        """The space of freed values, which only other values can use."""
        return self.value_peak_bytes - self.value_bytes

    def add_value(self, num_bytes: int, *, may_be_extent: bool) -> bool:
        """Count a value; False, and nothing is counted, if the limit does not allow it. `may_be_extent`: it may live
        in an extent instead, and is refused here if values would take more than half of the limit, because not every
        file system takes back the space that they once took."""
        growth = max(0, self.value_bytes + num_bytes - self.value_peak_bytes)
        most_bytes = min(self._most_value_bytes, self.limit_bytes // 2 if may_be_extent else self.limit_bytes)
        if growth and (growth > self.room_bytes or self.value_peak_bytes + growth > most_bytes):
            return False
        self.value_bytes += num_bytes
        self.value_peak_bytes += growth
        return True

    def rebuild(self, segment_bytes: int, value_bytes: int, index_bytes: int) -> None:
        """Count the files that an earlier process left, which may be more than the limit, if that was lowered."""
        self.segment_bytes = segment_bytes
        self.value_bytes = value_bytes
        self.value_peak_bytes = max(value_bytes, min(index_bytes, self.limit_bytes - segment_bytes))

    def note_given_back(self, index_bytes: int) -> None:
        """The index gave free pages back; `index_bytes`: what its file takes now."""
        self.value_peak_bytes = max(self.value_bytes, min(index_bytes, self.value_peak_bytes))

    def remove_value(self, num_bytes: int) -> None:
        self.value_bytes -= num_bytes


def divided_budget(disk_bytes: int, capacities: Sequence[int]) -> list[int]:
    """Divide a budget over drives in proportion to their capacities, in whole blocks; the shares add up to it."""
    if not any(capacities):
        capacities = [1] * len(capacities)
    ends = [disk_bytes * each // sum(capacities) for each in itertools.accumulate(capacities)]
    ends = [*(end // ALIGNMENT_BYTES * ALIGNMENT_BYTES for end in ends[:-1]), disk_bytes]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


DAY_SECONDS = 86_400.0


class WriteAllowance:
    """Bytes that may be written now: writing wears a flash drive out. For one loop. The allowance of a day refills
    evenly over 24 hours and may be spent at once: only the long run counts. It begins full whenever a store or a daemon
    is opened."""

    def __init__(self, day_bytes: int, now: float) -> None:
        self.day_bytes = day_bytes
        self._left_bytes = float(day_bytes)
        self._known_at = now

    def left_bytes(self, now: float) -> int:
        return math.floor(self._refilled(now))

    def take(self, num_bytes: int, now: float) -> bool:
        """Count a write that is about to begin; False, and nothing is counted, if it is more than is left."""
        self._left_bytes = self._refilled(now)
        self._known_at = now
        if num_bytes > self._left_bytes:
            return False
        self._left_bytes -= num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """`num_bytes` less were written than taken. Below 0: more."""
        self._left_bytes = min(self._left_bytes + num_bytes, float(self.day_bytes))

    def seconds_until(self, num_bytes: int, now: float) -> float:
        missing_bytes = num_bytes - self._refilled(now)
        if missing_bytes <= 0:
            return 0.0
        return math.inf if num_bytes > self.day_bytes else missing_bytes * DAY_SECONDS / self.day_bytes

    def refusal(self, num_bytes: int, now: float) -> str:
        seconds = self.seconds_until(num_bytes, now)
        found = f"{num_bytes} bytes are more than a day's"
        if not math.isinf(seconds):
            found = f"{self.left_bytes(now)} bytes of it are left, and {num_bytes} will be in {math.ceil(seconds)} s"
        return f"the write allowance of {self.day_bytes} bytes a day is spent: {found}"

    def _refilled(self, now: float) -> float:
        grown_bytes = (now - self._known_at) * self.day_bytes / DAY_SECONDS
        return min(self._left_bytes + grown_bytes, float(self.day_bytes))

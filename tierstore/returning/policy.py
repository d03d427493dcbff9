"""Decides when freed memory is returned. Pure: it is told the time and the sizes.

NOTE [Returned when it is short] Returned pages cost the next allocation page faults (some 0.5 s a gigabyte), and the
allocator's locks are held meanwhile. So "auto" returns all that is free only when less than a reserve (`reserve_of`) is
left of the tightest limit; again when this process, or another in the same control group, has taken a *step*: a quarter
of what is left. "always" returns whenever this process has grown by a fixed step. Both rest after each return for
`_REST` times as long as it took, unless the reserve is nearly used up: to be slow is better than to be killed."""

from __future__ import annotations

from ..base.config import Mode
from .room import Room, reserve_of

_GROWTH_BYTES = 32 * 2**20  # the step of "always"
_LEAST_STEP_BYTES = 4 * 2**20
_REST = 4
_LAST_PART = 4  # there is no rest while less than the reserve divided by this is left
_FASTEST_GROWTH = 8 * 2**30  # bytes a second: no training takes fresh pages faster, on the machines that were seen
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.002, 0.25
_ALWAYS_SECONDS = 0.004


class ReturnPolicy:
    """Decides for one process. Not thread-safe: one thread asks; never in the mode "never"."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._low_bytes: int | None = None  # the least that was resident since the last return
        self._rests_until = 0.0
        self._has_returned = False
        self._most_left_bytes = 0  # the most room that was seen since then: others in the control group take some too

    def is_due(self, now: float, resident_bytes: int, room: Room) -> bool:
        """Whether to return memory now. `now`: seconds of any steady clock. `room`: of the tightest limit."""
        low = self._low_bytes
        self._low_bytes = resident_bytes if low is None else min(low, resident_bytes)
        self._most_left_bytes = max(self._most_left_bytes, room.left_bytes)
        reserve = reserve_of(room.limit_bytes)
        if room.left_bytes < reserve:
            taken_bytes = max(resident_bytes - self._low_bytes, self._most_left_bytes - room.left_bytes)
            is_next_step = not self._has_returned or taken_bytes >= max(room.left_bytes // 4, _LEAST_STEP_BYTES)
            return is_next_step and (now >= self._rests_until or room.left_bytes < reserve // _LAST_PART)
        has_grown = resident_bytes - self._low_bytes >= _GROWTH_BYTES
        return self._mode == "always" and now >= self._rests_until and has_grown

    def returned(self, now: float, seconds: float, resident_bytes: int) -> None:
        self._low_bytes, self._most_left_bytes, self._has_returned = resident_bytes, 0, True
        self._rests_until = now + _REST * seconds

    def seconds_to_next_look(self, room: Room) -> float:
        if self._mode == "always":
            return _ALWAYS_SECONDS if room.left_bytes >= reserve_of(room.limit_bytes) else _SHORTEST_SECONDS
        spare_bytes = room.left_bytes - reserve_of(room.limit_bytes)
        return min(max(spare_bytes / _FASTEST_GROWTH, _SHORTEST_SECONDS), _LONGEST_SECONDS)

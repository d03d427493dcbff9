"""Decides how much may be written to the drive. Pure: the time is passed in.

Writing wears a flash drive out. The allowance of a day refills evenly over 24 hours and may be spent at once: training
comes in bursts, and only the long run counts for the drive. So any 24 hours see at most two days' allowance (a full
one, and the refill meanwhile), and n days at most n + 1. The allowance begins full whenever a store or a daemon is
opened: nothing is remembered beyond the process.
"""

from __future__ import annotations

import math

__all__ = ["DAY_SECONDS", "WriteAllowance"]

DAY_SECONDS = 86_400.0


class WriteAllowance:
    """Bytes that may be written now. Never blocks; not thread-safe (its owner is one loop).

    Args:
        day_bytes: the allowance of a day, and the most that is ever saved up; 0: nothing is ever written.
        now: in seconds, by any clock that does not go back; the same one in all calls.
    """

    def __init__(self, day_bytes: int, now: float) -> None:
        self.day_bytes = day_bytes
        self._left_bytes = float(day_bytes)
        self._known_at = now

    def left_bytes(self, now: float) -> int:
        """How much may be written now; below 0 where more was written than expected."""
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
        """Correct the count: `num_bytes` less were written than taken. Below 0: more."""
        self._left_bytes = min(self._left_bytes + num_bytes, float(self.day_bytes))

    def seconds_until(self, num_bytes: int, now: float) -> float:
        """How long until `num_bytes` may be written; infinite where they are more than a day's."""
        missing_bytes = num_bytes - self._refilled(now)
        if missing_bytes <= 0:
            return 0.0
        if num_bytes > self.day_bytes:
            return math.inf
        return missing_bytes * DAY_SECONDS / self.day_bytes

    def refusal(self, num_bytes: int, now: float) -> str:
        spent = f"the write allowance of {self.day_bytes} bytes a day is spent"
        seconds = self.seconds_until(num_bytes, now)
        if math.isinf(seconds):
            return f"{spent}: {num_bytes} bytes are more than a day's"
        left_bytes = self.left_bytes(now)
        return f"{spent}: {left_bytes} bytes of it are left, and {num_bytes} will be in {math.ceil(seconds)} s"

    def _refilled(self, now: float) -> float:
        grown_bytes = (now - self._known_at) * self.day_bytes / DAY_SECONDS
        return min(self._left_bytes + grown_bytes, float(self.day_bytes))

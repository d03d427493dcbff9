"""What a store counts: totals that only grow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat
from operator import call

KEPT_REASONS = ("parameter", "small", "alive elsewhere", "unsupported", "selected out")
STALL_CAUSES = ("pack waits for budget", "unpack waits for restore")


@dataclass(slots=True)
class Counters:
    """Totals since the store was opened. Changed under the store's lock."""

    packed_tensors: int = 0
    packed_bytes: int = 0
    deduplicated_bytes: int = 0
    kept_bytes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(KEPT_REASONS, 0)))
    spilled_bytes: int = 0
    written_bytes: int = 0
    restored_bytes: int = 0
    read_bytes: int = 0
    cancelled_bytes: int = 0
    forwarded_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    pageable_copy_bytes: int = 0
    prefetch_hits: int = 0
    prefetch_late: int = 0
    prefetch_misses: int = 0
    stall_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STALL_CAUSES, 0.0))


class NewlyKept:
    """Bytes that stayed where they are and that `Counters.kept_bytes` does not have yet, by reason.

    Any thread adds to it, without the lock: half of what autograd saves only stays."""

    def __init__(self) -> None:
        self._sizes: dict[str, deque[int]] = {}

    def adder(self, reason: str) -> Callable[[int], None]:
        """Adds the bytes of one saved tensor."""
        return self._sizes.setdefault(reason, deque()).append

    def move_to(self, kept_bytes: Counter[str]) -> None:
        """Under the store's lock. An interrupt that is not held back may lose bytes here; none are counted twice."""
        for reason, sizes in list(self._sizes.items()):
            kept_bytes[reason] += sum(map(call, repeat(sizes.popleft, len(sizes))))

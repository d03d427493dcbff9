"""The windows of host memory: how many bytes each one holds, and its limit. Pure; the store's lock guards it.

There are three windows. Each byte is charged to exactly one of them:

- *host*: bytes that the store keeps in memory because they will be needed, at most `host_bytes`;
- *staging*: bytes on their way to or from disk, at most `staging_bytes` (more by NOTE [Large tensors]);
- *outstanding*: bytes that only tensors handed out earlier still use. They stay until those die, so there is no limit.

The host window never exceeds its limit. Staging does in two cases: a single tensor larger than the window has to pass
through it, or a thread must have its bytes now (one tensor per thread). So the store holds at most both limits, the
outstanding bytes and this excess. With one thread the excess is one tensor, or two if a write and a demand coincide.

NOTE [Large tensors]
If staging holds only one of the largest tensors, they are written one after the other: each waits for the checksum, the
write and the index entry of the one before. So staging takes room from the host window, unless its size was given. It
takes enough to hold four of the largest tensors, but at most a quarter of the host window, as soon as the host window
is full and something has to move. The host limit falls by what the staging limit gains, so their sum stays the same.
Figures shown to users keep to the limits that were promised: bytes in the part that was taken count as the host's.

NOTE [Small tensors]
Registering, queueing and releasing a small tensor costs many times more than tracking it (`tracked.py`), and frees
little. So when the host window is full, small tensors stay tracked while staging has room for them, until they are
enough for a group (NOTE [Groups] in `residency/groups.py`). Staging is charged with their sum. Before anything else
uses staging, they are registered and charged like any other record. Those that cannot be registered yet count like all
tracked tensors: no window is charged."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .record import RuledRecord

SMALL_BYTES = 4 * 2**10
"""Tensors of at most so many bytes are small in any case. See NOTE [Small tensors]."""
_MOST_TRACKED_BYTES = 8 * 2**20
"""The most bytes of small tensors that stay tracked beyond the host window, and of a group."""
_MOST_MEMBER_BYTES = 3 * 2**19
"""To copy more than that takes as long as a record of its own."""
_LEAST_TRACKED_BYTES = 2**19
NUM_GROUPS = 4
"""So many groups fit into staging, so that one is written while the next ones are saved; and into host memory."""
_NUM_BATCHES = 2
"""So many batches fit: one is written while the next one is copied. Elsewhere they are limited to fewer bytes."""
NUM_MEMBERS = 4
"""So many of the largest tensors fit into a group."""
_DEVICE_GROUPS = 2
"""A group on an accelerator is larger by this factor: its bytes take less time to move, and each record as much."""


class Window:
    """A byte-accurate counter with a limit that its owner enforces.

    `granted_bytes`: charged for tensors on an accelerator that may still come: see NOTE [Grants] in `grants.py`."""

    __slots__ = ("granted_bytes", "limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = self.granted_bytes = 0

    def fits(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes <= self.limit_bytes


_NUM_LARGEST = 4
_MOST_TAKEN = 4
"""As a divisor: staging takes at most a quarter of the host window. See NOTE [Large tensors]."""


class HostWindows:
    """The three windows, and the charge of each record in them.

    Args:
        host_bytes, staging_bytes: the limits of those two windows; the outstanding window has none.
        grows: staging may take room for several of the largest tensors from host: see NOTE [Large tensors].

    Attributes:
        host_bytes_peak: the most bytes that were ever charged to host and to the part that staging took from it.
        tracked_bytes: charged to staging for tracked tensors: see NOTE [Small tensors].
        group_bytes, member_bytes: the most bytes of a group, and of a tensor in one.
        large_bytes: a tensor of more does not wait for others to leave with it.
        device_group_bytes, device_batch_bytes: the most bytes of a group, and of a batch, on an accelerator, as far as
            these windows decide.
    """

    def __init__(self, host_bytes: int, staging_bytes: int, *, grows: bool = False) -> None:
        self.host = Window(host_bytes)
        self.staging = Window(staging_bytes)
        self.outstanding = Window(sys.maxsize)
        self.host_bytes = host_bytes
        self.grows = grows
        self.host_bytes_peak = 0
        self.tracked_bytes = 0
        self._limit_groups()
        self._staging_bytes = staging_bytes
        self._taken_bytes = 0
        self._largest_bytes = 0

    @property
    def limits(self) -> tuple[int, int]:
        return self.host_bytes - self._taken_bytes, self._staging_bytes + self._taken_bytes

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Bytes in host and in staging. Bytes in the part that staging took count as host: see NOTE [Large tensors]."""
        host, staging = self.host.used_bytes, self.staging.used_bytes
        in_taken = max(0, min(staging - self._staging_bytes, self._taken_bytes, self.host_bytes - host))
        return host + in_taken, staging - in_taken

    @property
    def excess_bytes(self) -> int:
        return max(0, self.host.used_bytes - self.host.limit_bytes)

    def limit(self, host_bytes: int, staging_bytes: int) -> None:
        """Set both limits from now on. What a window holds beyond its limit stays until it is let go of or moved."""
        self.host_bytes, self._staging_bytes = host_bytes, staging_bytes
        self._taken_bytes = min(self._taken_bytes, host_bytes // _MOST_TAKEN)
        self.host.limit_bytes, self.staging.limit_bytes = self.limits
        self._limit_groups()

    def grow_staging(self, nbytes: int) -> None:
        """Let staging take room from host, which is full and needs `nbytes` more: see NOTE [Large tensors]."""
        if not self.grows:
            return
        largest_bytes = max(nbytes, self._largest_bytes, 1)
        most_bytes = self._staging_bytes + self.host_bytes // _MOST_TAKEN
        num_largest = min(_NUM_LARGEST, most_bytes // largest_bytes)
        taken_bytes = num_largest * largest_bytes - self._staging_bytes
        if num_largest > 1 and taken_bytes > self._taken_bytes:
            self._taken_bytes = taken_bytes
            self.host.limit_bytes, self.staging.limit_bytes = self.limits
            self._limit_groups()

    def charge(self, record: RuledRecord, window: Window | None) -> None:
        """Move the record's charge to `window` (None: to none)."""
        if record.window is not None:
            record.window.used_bytes -= record.charged_bytes
        record.window = window
        record.charged_bytes = 0
        if window is not None:
            record.charged_bytes = record.nbytes
            window.used_bytes += record.charged_bytes
            if record.charged_bytes > self._largest_bytes:
                self._largest_bytes = record.charged_bytes
            if self._taken_bytes or window is self.host:
                host_bytes = self.used_bytes[0] if self._taken_bytes else self.host.used_bytes
                if host_bytes > self.host_bytes_peak:
                    self.host_bytes_peak = host_bytes

    def _limit_groups(self) -> None:
        room_bytes = min(self.staging.limit_bytes, self.host.limit_bytes or sys.maxsize)
        self.group_bytes = min(_MOST_TRACKED_BYTES, room_bytes // NUM_GROUPS)
        self.member_bytes = min(self.group_bytes // NUM_MEMBERS, _MOST_MEMBER_BYTES)
        self.large_bytes = max(self.member_bytes, SMALL_BYTES)
        self._most_beyond_bytes = max(self.group_bytes, _LEAST_TRACKED_BYTES)
        self.device_group_bytes = min(_DEVICE_GROUPS * _MOST_TRACKED_BYTES, room_bytes // NUM_GROUPS)
        self.device_batch_bytes = room_bytes // _NUM_BATCHES

    def may_stay_tracked(self, nbytes: int) -> bool:
        if nbytes > self.large_bytes or self.tracked_bytes + nbytes > self._most_beyond_bytes:
            return False
        host, staging = self.host, self.staging  # as `staging.fits(nbytes + self.excess_bytes)`, without the calls
        excess_bytes = max(0, host.used_bytes - host.limit_bytes)
        return staging.used_bytes + nbytes + excess_bytes <= staging.limit_bytes

    @property
    def free_bytes(self) -> tuple[int, int]:
        """Of host, and of staging without what small tensors will take there once there are some; may be negative."""
        host_bytes = self.host.limit_bytes - self.host.used_bytes
        staging_bytes = self.staging.limit_bytes - self.staging.used_bytes + min(0, host_bytes)
        foreseen_bytes = self._most_beyond_bytes - self.tracked_bytes if self.tracked_bytes else 0
        return host_bytes, staging_bytes - foreseen_bytes

    def keep_tracked(self, nbytes: int) -> None:
        surplus = self.tracked_bytes - nbytes
        if surplus > 0:
            self.tracked_bytes = nbytes
            self.staging.used_bytes -= surplus

    def admits_move(self, nbytes: int, *, from_host: bool = False) -> bool:
        """Whether `nbytes` may start to move: they fit into staging, or nothing else is moving.

        `from_host`: they are charged to host already."""
        staging, host = self.staging, self.host
        held_bytes = staging.used_bytes + nbytes
        if not from_host and host.used_bytes > host.limit_bytes:  # as `excess_bytes`, without its call
            held_bytes += host.used_bytes - host.limit_bytes
        return held_bytes <= staging.limit_bytes or not staging.used_bytes

    def window_for_prefetch(self, nbytes: int, *, is_far: bool = True) -> Window | None:
        """The window that has room for a prefetch; None: neither has. A prefetch never exceeds a limit.

        `is_far`: the host window may be used too, not only staging."""
        staging, host = self.staging, self.host  # no calls: every read asks, and more than once
        nbytes += max(0, host.used_bytes - host.limit_bytes)
        if staging.used_bytes + nbytes <= staging.limit_bytes:
            return staging
        return host if is_far and host.used_bytes + nbytes <= host.limit_bytes else None

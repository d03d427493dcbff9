"""The books of host memory: who holds how many bytes, against which limit. Pure; the store's lock guards it.

Three windows, each byte in exactly one of them:

- *host*: what the store keeps in memory because it will be needed, at most `host_bytes`;
- *staging*: what is being moved to or from disk, at most `staging_bytes`, a fixed size;
- *lent*: what was handed out and is still alive there, though the store itself has let go of it. It ends when
  whoever was given it lets go; no limit can be put on it.

The host window never exceeds its limit. Staging is overdrawn by a single tensor that is larger than it and has to
pass through, and by one for each thread that must have its bytes now. Held in all are at most both limits, plus what is
lent, plus that: with one thread one tensor in forward or in backward, two where a write and a demand come together.

NOTE [Large tensors]
Where staging holds only one of the largest tensors, they go out one after the other: each waits for the checksum, the
write and the index of the one before. Unless its size was given, staging therefore takes from the host window what
four of the largest need, at most a quarter of that window, as soon as the host window is full and something has to
move. From then on the host window's limit is lower by as much as staging's is higher: in all they hold what they did.
What is told to others is the promise: the bytes in the part that was taken count as the host's.

NOTE [Small tensors]
To book, queue and release a tensor of some bytes costs many times what it costs to note it (`noted.py`), and frees next
to nothing. So where the host window is full, small tensors stay noted as long as staging has room for them, up to a
bounded amount. They are charged to staging, in one sum. Whoever needs staging has them booked first; then each is
charged as any other record, and what cannot be booked yet counts as all that is noted does.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["MOST_NOTED_BYTES", "SMALL_BYTES", "Charged", "HostBooks", "Window"]

SMALL_BYTES = 4 * 2**10
"""Larger tensors are never small. See NOTE [Small tensors]."""
MOST_NOTED_BYTES = 2**19
"""So many bytes of small tensors stay noted beyond the host window, at most."""


class Window:
    """A byte-accurate counter with a limit that its owner enforces.

    Attributes:
        limit_bytes: None: unlimited.
        used_bytes: charged now.
        peak_bytes: the most that was ever charged at once.
    """

    __slots__ = ("limit_bytes", "peak_bytes", "used_bytes")

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    def fits(self, nbytes: int) -> bool:
        """Whether so many more bytes stay within the limit."""
        return self.limit_bytes is None or self.used_bytes + nbytes <= self.limit_bytes

    def charge(self, nbytes: int) -> None:
        """Count bytes in."""
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def discharge(self, nbytes: int) -> None:
        """Count bytes out."""
        self.used_bytes -= nbytes


class Charged(Protocol):
    """What is charged to a window: a `Record`, or a simulated one.

    Attributes:
        nbytes: its size.
        window, charged_bytes: which window is charged, and with how much. Set by `HostBooks.charge` alone.
    """

    nbytes: int
    window: Window | None
    charged_bytes: int


_NUM_LARGEST = 4
_MOST_TAKEN = 4
"""A quarter of the host window. See NOTE [Large tensors]."""


class HostBooks:
    """The three windows, and the charge of each record in them.

    Args:
        host_bytes, staging_bytes: the limits of the first two.
        grows: staging takes from host what several of the largest tensors need: see NOTE [Large tensors].

    Attributes:
        host_bytes: the limit of host, as it was given.
        grows: as above.
        host_bytes_peak: the most that was ever charged to host, and to what staging took from it.
        noted_bytes, most_noted_bytes: charged to staging for what is only noted, and at most: see NOTE [Small tensors].
    """

    def __init__(self, host_bytes: int, staging_bytes: int, *, grows: bool = False) -> None:
        self.host = Window(host_bytes)
        self.staging = Window(staging_bytes)
        self.lent = Window(None)
        self.host_bytes = host_bytes
        self.grows = grows
        self.host_bytes_peak = 0
        self.most_noted_bytes = MOST_NOTED_BYTES
        self.noted_bytes = 0
        self._staging_bytes = staging_bytes
        self._taken_bytes = 0
        self._largest_bytes = 0

    @property
    def limits(self) -> tuple[int, int]:
        """Of host and of staging, as they are now."""
        return self.host_bytes - self._taken_bytes, self._staging_bytes + self._taken_bytes

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Held now, as it is promised: within host, and beside it, in staging."""
        host, staging = self.host.used_bytes, self.staging.used_bytes
        in_taken = max(0, min(staging - self._staging_bytes, self._taken_bytes, self.host_bytes - host))
        return host + in_taken, staging - in_taken

    @property
    def excess_bytes(self) -> int:
        """What host still holds of the part that staging took."""
        return max(0, self.host.used_bytes - self.host_bytes + self._taken_bytes)

    def grow_staging(self, nbytes: int) -> None:
        """Host is full, and has to make room for so many bytes: see NOTE [Large tensors]."""
        if not self.grows:
            return
        largest_bytes = max(nbytes, self._largest_bytes, 1)
        most_bytes = self._staging_bytes + self.host_bytes // _MOST_TAKEN
        num_largest = min(_NUM_LARGEST, most_bytes // largest_bytes)
        if num_largest > 1:
            self._taken_bytes = max(self._taken_bytes, num_largest * largest_bytes - self._staging_bytes)
            self.host.limit_bytes, self.staging.limit_bytes = self.limits

    def charge(self, record: Charged, window: Window | None, nbytes: int | None = None) -> None:
        """Move the record's charge to `window` (None: nowhere); `nbytes` is its new size, if that changes."""
        if record.window is not None:
            record.window.discharge(record.charged_bytes)
        record.window = window
        record.charged_bytes = 0
        if window is not None:
            record.charged_bytes = record.nbytes if nbytes is None else nbytes
            window.charge(record.charged_bytes)
            self._largest_bytes = max(self._largest_bytes, record.charged_bytes)
            self.host_bytes_peak = max(self.host_bytes_peak, self.used_bytes[0])

    def may_stay_noted(self, nbytes: int) -> bool:
        """Whether staging has room for so many bytes that are to be noted: see NOTE [Small tensors]."""
        return (
            nbytes <= SMALL_BYTES
            and self.noted_bytes + nbytes <= self.most_noted_bytes
            and self.staging.fits(nbytes + self.excess_bytes)
        )

    def charge_noted(self, nbytes: int) -> None:
        """So many more bytes are only noted, and charged to staging."""
        self.noted_bytes += nbytes
        self.staging.charge(nbytes)

    def keep_noted(self, nbytes: int) -> None:
        """At most so many bytes are noted from now on: no more than that stays charged."""
        surplus = self.noted_bytes - nbytes
        if surplus > 0:
            self.noted_bytes = nbytes
            self.staging.discharge(surplus)

    def admits_move(self, nbytes: int, *, from_host: bool = False) -> bool:
        """Whether so many bytes may start to move: they fit, or nothing else is moving.

        `from_host`: they are charged to host already.
        """
        held_bytes = nbytes if from_host else nbytes + self.excess_bytes
        return self.staging.fits(held_bytes) or self.staging.used_bytes == 0

    def window_for_prefetch(self, nbytes: int, *, is_far: bool = True) -> Window | None:
        """Where bytes that nobody waits for may be put; None: nowhere now, a prefetch never overdraws.

        `is_far`: not in staging alone.
        """
        for window in (self.staging, self.host) if is_far else (self.staging,):
            if window.fits(nbytes + self.excess_bytes):
                return window
        return None

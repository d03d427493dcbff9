"""The books of host memory: who holds how many bytes, against which limit. Pure; the store's lock guards it.

Three windows, each byte in exactly one of them:

- *host*: what the store keeps in memory because it will be needed, at most `host_bytes`;
- *staging*: what is being moved to or from disk, at most `staging_bytes`, a fixed size;
- *lent*: what was handed out and is still alive there, though the store itself has let go of it. It ends when
  whoever was given it lets go; no limit can be put on it.

The host window never exceeds its limit. Staging is overdrawn by a single tensor that is larger than it and has to
pass through, and by one for each thread that must have its bytes now. Held in all are at most both limits, plus what is
lent, plus that: with one thread one tensor in forward or in backward, two where a write and a demand come together.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Charged", "HostBooks", "Window"]


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


class HostBooks:
    """The three windows, and the charge of each record in them.

    Args:
        host_bytes, staging_bytes: the limits of the first two.
    """

    def __init__(self, host_bytes: int, staging_bytes: int) -> None:
        self.host = Window(host_bytes)
        self.staging = Window(staging_bytes)
        self.lent = Window(None)

    def charge(self, record: Charged, window: Window | None, nbytes: int | None = None) -> None:
        """Move the record's charge to `window` (None: nowhere); `nbytes` is its new size, if that changes."""
        if record.window is not None:
            record.window.discharge(record.charged_bytes)
        record.window = window
        record.charged_bytes = 0
        if window is not None:
            record.charged_bytes = record.nbytes if nbytes is None else nbytes
            window.charge(record.charged_bytes)

    def admits_move(self, nbytes: int) -> bool:
        """Whether so many bytes may start to move: they fit, or nothing else is moving."""
        return self.staging.fits(nbytes) or self.staging.used_bytes == 0

    def window_for_prefetch(self, nbytes: int, *, is_far: bool = True) -> Window | None:
        """Where bytes that nobody waits for may be put; None: nowhere now, a prefetch never overdraws.

        `is_far`: not in staging alone.
        """
        for window in (self.staging, self.host) if is_far else (self.staging,):
            if window.fits(nbytes):
                return window
        return None

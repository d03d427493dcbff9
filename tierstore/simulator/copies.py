"""SimulatedCopies between a simulated accelerator and host memory, in virtual time."""

from __future__ import annotations

from typing import Protocol

from .clock import Process, Resume

__all__ = ["Copy", "VirtualCopies"]


class Copy:
    """A copy between device and host memory, queued on the stream of its direction. See `Marker`.

    Attributes:
        nbytes: bytes that it moves.
        ready: a copy that has to be over before this one begins; None: there is none.
        is_over: it has ended.
    """

    __slots__ = ("_waiting", "is_over", "nbytes", "ready")

    def __init__(self, nbytes: int, ready: Copy | None = None) -> None:
        self.nbytes = nbytes
        self.ready = ready
        self.is_over = False
        self._waiting: list[Resume] = []

    def query(self) -> bool:
        return self.is_over

    def wait(self, resume: Resume) -> None:
        """A `Wait`: go on when it is over."""
        if self.is_over:
            resume()
        else:
            self._waiting.append(resume)

    def end(self) -> None:
        """End the copy, and let all who wait for it go on."""
        self.is_over = True
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()


class VirtualCopies(Protocol):
    """The copy engine. See `tierstore.residency.copies.Copies`."""

    def copy_out(self, copy: Copy) -> None:
        """Queue a copy to host memory, after the present computation."""

    def copy_in(self, copy: Copy) -> None:
        """Queue a copy to the device."""

    def wait(self, copy: Copy) -> None:
        """Make later computation come after the copy."""

    def catch_up(self) -> Process:
        """Wait for the copies given to `wait`. The next computation begins when this ends."""

"""The times of one step of a graph on its accelerator, from marks in the stream that computes.

Where the host runs ahead of the device it cannot measure them. Where it does not, the device waits for the host, also
between two marks around a wait for a copy. The time that the host takes from one to the other is not the copy's.
See NOTE [What compute covers] in `ledger/coverage.py`."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ledger.coverage import Measured

if TYPE_CHECKING:
    import torch

    from ..tensors.copies import Copies, Marker


class _Wait(NamedTuple):
    """A wait for a copy: the marks before and after it, and the seconds that the host took to queue it."""

    before: Marker
    after: Marker
    queueing_seconds: float


class GraphTimes:
    """The marks of one step of a graph in its streams. Guarded by the store's lock until `end`.

    `is_marked`: if it is False, only what the device refuses is noted. `refused_bytes`: of the largest copy back for
    which the device had no memory."""

    def __init__(
        self, copies: Copies, device: torch.device, stream: Any, staying_bytes: int, *, is_marked: bool = True
    ) -> None:
        self.is_marked = is_marked
        self._copies = copies
        self._device = device
        self.staying_bytes = staying_bytes
        self.is_open = True
        self._is_whole = True
        self._out_bytes = self._in_bytes = self.refused_bytes = 0
        self._waits: tuple[list[_Wait], list[_Wait]] = [], []  # of forward, of backward
        self._began = self._mark(stream)
        self._turned: Marker | None = None
        self._ended: Marker | None = None

    def _mark(self, stream: Any) -> Marker | None:
        if not self.is_marked:
            return None
        mark = self._copies.mark(stream)
        if mark is None:
            self.spoil()
        return mark

    def spoil(self) -> None:
        """Something else disturbed the step: ignore its times."""
        self._is_whole = self.is_open = False

    def end(self) -> None:
        """The graph is gone: take no more marks."""
        self.is_open = False

    def asked_for(self, stream: Any) -> None:
        self._ended = self._mark(stream)
        if self._turned is None:
            self._turned = self._ended

    def waits(self, stream: Any, wait: Callable[[], None]) -> None:
        if not self.is_marked:
            wait()
            return
        began = perf_counter()
        before = self._mark(stream)
        wait()
        after = self._mark(stream)
        if before is not None and after is not None:
            self._waits[self._turned is not None].append(_Wait(before, after, perf_counter() - began))
            if self._turned is not None:
                self._ended = after

    def copies_out(self, nbytes: int) -> None:
        if self._turned is None:
            self._out_bytes += nbytes

    def copies_in(self, nbytes: int) -> None:
        if self._turned is not None:
            self._in_bytes += nbytes

    def refused(self, nbytes: int) -> None:
        self.refused_bytes = max(self.refused_bytes, nbytes)

    def is_over(self) -> bool:
        """Whether the device has passed all marks, or the times are ignored. Does not block."""
        return not self._is_whole or bool(self.refused_bytes) or all(mark.query() for mark in self._marks())

    def wait(self) -> bool:
        """Block until the device has passed all marks. Not under the store's lock.

        Returns False at once if this thread captures a graph: waiting would break the capture off."""
        if self._copies.mark(self._copies.current_stream(self._device)) is None:
            return False
        for mark in self._marks():
            mark.synchronize()
        return True

    def _marks(self) -> list[Marker]:
        points = self._began, self._turned, self._ended
        marks = [mark for mark in points if mark is not None]
        return marks + [mark for waits in self._waits for each in waits for mark in (each.before, each.after)]

    def measured(self) -> Measured | None:
        """The figures of the step, once `is_over`; None: they are incomplete or spoilt."""
        if not self._is_whole or self._began is None or self._turned is None or self._ended is None:
            return None
        between = self._copies.seconds_between
        forward, backward = (
            sum(max(0.0, between(each.before, each.after) - each.queueing_seconds) for each in waits)
            for waits in self._waits
        )
        return Measured(
            between(self._began, self._turned), forward, self._out_bytes,
            between(self._turned, self._ended), backward, self._in_bytes,
        )  # fmt: skip

    def spare_bytes(self) -> int | None:
        return self._copies.spare_bytes(self._device)

"""How many of the bytes that a graph saves on an accelerator must stay there, so that compute never waits for copies.

NOTE [What compute covers]
Copies run beside compute. Bytes that the link can carry out during forward, and back during backward, cost no time. How
many these are cannot be known beforehand, so the store measures the steps of the graph. In the first step everything
leaves. If compute waited for copies during a share w of forward, the link was busy all the time, and the share w of the
bytes it carried was too much; likewise in backward. From then on the larger of the two amounts stays. If compute still
waits in the next step, more stays. The amount never shrinks, so that one slow step cannot make memory use swing. So no
step may mislead: it is ignored if another graph changed the amount that stays, or used the link, before it ended.

The times come from marks in the stream that computes; the host runs ahead of it and cannot measure them. They are read
when the graph comes again, if the device has passed all marks by then.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from .copies import Copies, Marker

__all__ = ["Coverage", "GraphTimes", "Measured"]

_TOLERATED_SHARE = 0.01
"""A share of forward or backward. Shorter waits are noise."""
_MAX_GRAPHS = 64
_MAX_UNREAD = 4


class Measured(NamedTuple):
    """One step of a graph, in seconds of its stream and bytes over the link.

    Attributes:
        forward_seconds, backward_seconds: from the first pack to the first unpack, and from there to the last unpack.
        forward_wait_seconds, backward_wait_seconds: the part of these times in which compute waited for copies.
        out_bytes, in_bytes: bytes copied out in forward, and back in backward.
    """

    forward_seconds: float
    forward_wait_seconds: float
    out_bytes: int
    backward_seconds: float
    backward_wait_seconds: float
    in_bytes: int

    def uncovered_bytes(self) -> int:
        """The bytes that should not have crossed the link: without them compute would not have waited."""
        out = _excess(self.out_bytes, self.forward_wait_seconds, self.forward_seconds)
        back = _excess(self.in_bytes, self.backward_wait_seconds, self.backward_seconds)
        return max(out, back)


def _excess(nbytes: int, wait_seconds: float, seconds: float) -> int:
    return int(nbytes * wait_seconds / seconds) if wait_seconds > _TOLERATED_SHARE * seconds else 0


class GraphTimes:
    """The marks of one step of a graph in its streams. Guarded by the store's lock until `end`.

    Args:
        copies: the copy engine of the streams.
        device: the accelerator on which the graph saves.
        stream: the stream of the first pack.
        staying_bytes: how many bytes may stay on the device in this step.
    """

    def __init__(self, copies: Copies, device: torch.device, stream: Any, staying_bytes: int) -> None:
        self._copies = copies
        self._device = device
        self.staying_bytes = staying_bytes
        self.is_open = True
        self._is_whole = True
        self._out_bytes = self._in_bytes = 0
        self._waits: tuple[list[tuple[Marker, Marker]], list[tuple[Marker, Marker]]] = [], []  # of forward, of backward
        self._began = self._mark(stream)
        self._turned: Marker | None = None
        self._ended: Marker | None = None

    def _mark(self, stream: Any) -> Marker | None:
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
        """Backward asks for a saved tensor on that stream."""
        self._ended = self._mark(stream)
        if self._turned is None:
            self._turned = self._ended

    def waits(self, stream: Any, wait: Callable[[], None]) -> None:
        """Call `wait`, which makes the stream wait, and mark the stream before and after it."""
        before = self._mark(stream)
        wait()
        after = self._mark(stream)
        if before is not None and after is not None:
            self._waits[self._turned is not None].append((before, after))
            if self._turned is not None:
                self._ended = after

    def copies_out(self, nbytes: int) -> None:
        """`nbytes` are copied out; those of forward are counted."""
        if self._turned is None:
            self._out_bytes += nbytes

    def copies_in(self, nbytes: int) -> None:
        """`nbytes` are copied back; those of backward are counted."""
        if self._turned is not None:
            self._in_bytes += nbytes

    def is_over(self) -> bool:
        """Whether the device has passed all marks, or the times are ignored. Does not block."""
        return not self._is_whole or all(mark.query() for mark in self._marks())

    def wait(self) -> bool:
        """Block until the device has passed all marks. Not under the store's lock.

        Returns False at once if this thread captures a graph: waiting would break the capture off.
        """
        if self._copies.mark(self._copies.current_stream(self._device)) is None:
            return False
        for mark in self._marks():
            mark.synchronize()
        return True

    def _marks(self) -> list[Marker]:
        points = self._began, self._turned, self._ended
        marks = [mark for mark in points if mark is not None]
        return marks + [mark for waits in self._waits for pair in waits for mark in pair]

    def measured(self) -> Measured | None:
        """The figures of the step, once `is_over`; None: they are incomplete or spoilt."""
        if not self._is_whole or self._began is None or self._turned is None or self._ended is None:
            return None
        between = self._copies.seconds_between
        forward, backward = (sum(between(*pair) for pair in waits) for waits in self._waits)
        return Measured(
            between(self._began, self._turned), forward, self._out_bytes,
            between(self._turned, self._ended), backward, self._in_bytes,
        )  # fmt: skip

    def spare_bytes(self) -> int | None:
        """Bytes of device memory that were never in use so far; None: unknown."""
        return self._copies.spare_bytes(self._device)


class Coverage:
    """How many bytes of each graph, by its signature, stay on the device. Any thread may call it."""

    def __init__(self) -> None:
        self._staying: OrderedDict[int, int] = OrderedDict()
        self._unread: deque[tuple[int, GraphTimes]] = deque()

    def note(self, signature: int, times: GraphTimes) -> None:
        """A step of the graph is over; its times are read later."""
        times.end()
        self._unread.append((signature, times))
        while len(self._unread) > _MAX_UNREAD:  # the host is far ahead of the device: a later step will tell
            self._unread.popleft()

    def staying_bytes(self, signature: int) -> int:
        """How many bytes are to stay, by the steps measured so far; 0 for an unknown graph. Does not block."""
        self._read()
        return self._staying.get(signature, 0)

    def _read(self) -> None:
        try:
            while True:
                signature, times = self._unread.popleft()
                if not times.is_over():
                    self._unread.appendleft((signature, times))
                    return
                self._learn(signature, times)
        except IndexError:
            pass  # no more

    def _learn(self, signature: int, times: GraphTimes) -> None:
        measured = times.measured()
        uncovered = 0 if measured is None else measured.uncovered_bytes()
        if uncovered:
            spare = times.spare_bytes()
            more = uncovered if spare is None else min(uncovered, spare)
            self._staying[signature] = max(self._staying.get(signature, 0), times.staying_bytes + more)
        while len(self._staying) > _MAX_GRAPHS:
            self._staying.popitem(last=False)

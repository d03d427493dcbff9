"""How much of what a graph saves on an accelerator has to stay there, so that nothing waits for the link.

NOTE [What compute covers]
Copies run beside compute, so as many bytes as the link carries while forward runs, and back while backward does, leave
and return at no time. How many that is nobody can know beforehand: it is found from the graph's own steps. At first
everything leaves. If compute then waited for copies during a share w of forward, the link was busy all along, and the
share w of what it carried was too much; likewise backward. So much stays from then on. What still waits is found out by
the next step; it is never taken back, so that one slow step cannot make memory swing. So a step tells something only
if no other graph set what stays, or went over the link, before it was over.

Times are those of the stream that computes, from marks in it; the host is ahead of it and knows nothing. They are
looked at when the graph comes again, if they are there by then.
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
"""Of forward or backward: waiting less is noise."""
_MAX_GRAPHS = 64
_MAX_UNREAD = 4


class Measured(NamedTuple):
    """One coming of a graph, in seconds of its stream and bytes over the link.

    Attributes:
        forward_seconds, backward_seconds: from its first pack to its first unpack, and from there to its last.
        forward_wait_seconds, backward_wait_seconds: of them, compute waited for copies.
        out_bytes, in_bytes: copied out in forward, and back in backward.
    """

    forward_seconds: float
    forward_wait_seconds: float
    out_bytes: int
    backward_seconds: float
    backward_wait_seconds: float
    in_bytes: int

    def uncovered_bytes(self) -> int:
        """So much less over the link, and nothing would have waited."""
        out = _excess(self.out_bytes, self.forward_wait_seconds, self.forward_seconds)
        back = _excess(self.in_bytes, self.backward_wait_seconds, self.backward_seconds)
        return max(out, back)


def _excess(nbytes: int, wait_seconds: float, seconds: float) -> int:
    return int(nbytes * wait_seconds / seconds) if wait_seconds > _TOLERATED_SHARE * seconds else 0


class GraphTimes:
    """The marks of one coming of a graph. Guarded by the store's lock until `end`.

    Args:
        copies: whose streams these are.
        device: where the graph saves.
        stream: that packs first.
        staying_bytes: what stays this time.
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
        """Something else came between: this tells nothing."""
        self._is_whole = self.is_open = False

    def end(self) -> None:
        """The graph is gone."""
        self.is_open = False

    def asked_for(self, stream: Any) -> None:
        """Backward, on that stream, asks for something."""
        self._ended = self._mark(stream)
        if self._turned is None:
            self._turned = self._ended

    def waits(self, stream: Any, wait: Callable[[], None]) -> None:
        """Have the stream wait, and take the time of that."""
        before = self._mark(stream)
        wait()
        after = self._mark(stream)
        if before is not None and after is not None:
            self._waits[self._turned is not None].append((before, after))
            if self._turned is not None:
                self._ended = after

    def copies_out(self, nbytes: int) -> None:
        """So much leaves."""
        if self._turned is None:
            self._out_bytes += nbytes

    def copies_in(self, nbytes: int) -> None:
        """So much comes back."""
        if self._turned is not None:
            self._in_bytes += nbytes

    def is_over(self) -> bool:
        """Whether the device has come to all marks. Does not block."""
        return not self._is_whole or all(mark.query() for mark in self._marks())

    def wait(self) -> bool:
        """Return when it has: True; or at once, while this thread captures a graph, which waiting would end: False.

        Blocks; not under the store's lock.
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
        """Once it is over; None: it tells nothing."""
        if not self._is_whole or self._began is None or self._turned is None or self._ended is None:
            return None
        between = self._copies.seconds_between
        forward, backward = (sum(between(*pair) for pair in waits) for waits in self._waits)
        return Measured(
            between(self._began, self._turned), forward, self._out_bytes,
            between(self._turned, self._ended), backward, self._in_bytes,
        )  # fmt: skip

    def spare_bytes(self) -> int | None:
        """Device memory that was never needed so far; None: unknown."""
        return self._copies.spare_bytes(self._device)


class Coverage:
    """For each graph, by its signature, how much of what it saves stays on the device. For any thread."""

    def __init__(self) -> None:
        self._staying: OrderedDict[int, int] = OrderedDict()
        self._unread: deque[tuple[int, GraphTimes]] = deque()

    def note(self, signature: int, times: GraphTimes) -> None:
        """The graph has come and gone."""
        times.end()
        self._unread.append((signature, times))
        while len(self._unread) > _MAX_UNREAD:  # the host is so far ahead: let it be a later one
            self._unread.popleft()

    def staying_bytes(self, signature: int) -> int:
        """By what is known now. Does not block."""
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

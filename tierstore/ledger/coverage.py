"""How many of the bytes that a graph saves on an accelerator must stay there, so that compute never waits for copies.

NOTE [What compute covers]
Copies run beside compute. Bytes that the link can carry out during forward, and back during backward, cost no time. How
many these are cannot be known beforehand, so the store measures the steps of the graph. In the first step everything
leaves. If compute waited for copies during a share w of forward, the link was busy all the time, and the share w of the
bytes it carried was too much; likewise in backward. From then on the larger of the two amounts stays. If compute still
waits in the next step, more stays. The amount never shrinks, so that one slow step cannot make memory use swing. So no
step may mislead: it is ignored if another graph changed the amount that stays, or used the link, before it ended.

The times come from marks in the stream that computes; the host runs ahead of it and cannot measure them. They are read
when the graph comes again, if the device has passed all marks by then."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, NamedTuple

_TOLERATED_SHARE = 0.01
"""A share of forward or backward. Shorter waits are noise."""
_MAX_GRAPHS = 64
_MAX_UNREAD = 4


class Measured(NamedTuple):
    """One step of a graph, in seconds of its stream and bytes over the link.

    Forward ends, and backward begins, with the first unpack. The waits are the parts of these times in which compute
    waited for copies."""

    forward_seconds: float
    forward_wait_seconds: float
    out_bytes: int
    backward_seconds: float
    backward_wait_seconds: float
    in_bytes: int

    def uncovered_bytes(self) -> int:
        out = _excess(self.out_bytes, self.forward_wait_seconds, self.forward_seconds)
        back = _excess(self.in_bytes, self.backward_wait_seconds, self.backward_seconds)
        return max(out, back)


def _excess(nbytes: int, wait_seconds: float, seconds: float) -> int:
    return int(nbytes * wait_seconds / seconds) if wait_seconds > _TOLERATED_SHARE * seconds else 0


class Coverage:
    """How many bytes of each graph, by its signature, stay on the device. Any thread may call it.

    The times of one step, as they are taken, are the `GraphTimes` of `residency/graph_times.py`."""

    def __init__(self) -> None:
        self._staying: OrderedDict[int, int] = OrderedDict()
        self._unread: deque[tuple[int, Any]] = deque()

    def note(self, signature: int, times: Any) -> None:
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

    def _learn(self, signature: int, times: Any) -> None:
        measured = times.measured()
        uncovered = 0 if measured is None else measured.uncovered_bytes()
        if uncovered:
            spare = times.spare_bytes()
            more = uncovered if spare is None else min(uncovered, spare)
            self._staying[signature] = max(self._staying.get(signature, 0), times.staying_bytes + more)
        while len(self._staying) > _MAX_GRAPHS:
            self._staying.popitem(last=False)

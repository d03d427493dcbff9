"""How many of the bytes that a graph saves on an accelerator must stay there, so that compute never waits for copies.

NOTE [What compute covers]
Copies run beside compute. Bytes that the link can carry out during forward, and back during backward, cost no time. How
many these are cannot be known beforehand, so the store measures the steps of the graph. In the first step everything
leaves. If compute waited for copies during a share w of forward, the link was busy all the time, and the share w of the
bytes it carried was too much; likewise in backward. From then on the larger of the two amounts stays. If compute still
waits in the next step, more stays. Slow steps do not make the amount shrink, so that memory use does not swing. So no
step may mislead: it is ignored if another graph changed the amount that stays, or used the link, before it ended.

Where the device refuses memory for a copy back, compute waits for that copy too, but not for the link: too much stays.
Such a step makes the amount shrink, and graphs with these nodes never keep as much again.

A graph of the same nodes but other sizes, such as the next length of a sequence, has not been measured yet. Then a
share of its bytes stays: the largest one of all graphs with these nodes.

The times come from marks in the stream that computes; the host runs ahead of it and cannot measure them. They are read
when the graph comes again, if the device has passed all marks by then. Marks cost calls of the driver, two of them for
each wait. So once some steps in a row have changed nothing, only one step in many is marked. That the device refuses
memory is noted in every step."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from typing import Any, NamedTuple

_TOLERATED_SHARE = 0.01
"""A share of forward or backward. Shorter waits are noise."""
_LEAST_SHRINKING = 4
"""As a divisor: so much less stays, at least, after the device has refused a copy back."""
_LEAST_LEAVING = 16
"""As a divisor, of the bytes of a graph. If less would leave, nothing does: what leaves costs the host time, and where
nothing does, forward needs no hooks (NOTE [Hooks off] in `whole_graphs.py`)."""
_NUM_SETTLED = 3
"""After so many steps that changed nothing, what stays is taken for found."""
_NUM_UNMARKED = 31
"""Steps between two that are marked, from then on."""
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


class Measurable(NamedTuple):
    """A graph, by what is known of it: by the signature of all its packs, and by that of its nodes alone, its *shape*.

    `nbytes`: what it saves on accelerators."""

    signature: int
    shape: int
    nbytes: int


class Coverage:
    """How many bytes of each graph, by its signature, stay on the device. Any thread may call it.

    The times of one step, as they are taken, are the `GraphTimes` of `residency/graph_times.py`."""

    def __init__(self) -> None:
        self._staying: OrderedDict[int, int] = OrderedDict()
        self._shares: OrderedDict[int, float] = OrderedDict()
        self._most: OrderedDict[int, int] = OrderedDict()  # bytes, by shape: the device has refused more
        self._settled: OrderedDict[int, list[int]] = OrderedDict()  # steps without a change; steps since a marked one
        self._unread: deque[tuple[Measurable, Any]] = deque()
        self._num_found = 0

    def note(self, graph: Measurable, times: Any) -> None:
        times.end()
        self._unread.append((graph, times))
        while len(self._unread) > _MAX_UNREAD:  # the host is far ahead of the device: a later step will tell
            self._unread.popleft()

    def staying_bytes(self, graph: Measurable, scale: float = 1) -> int:
        """How many bytes are to stay, by the steps measured so far; 0 for an unknown graph. Does not block.

        `scale`: of a graph with the same nodes and so many times the bytes."""
        self._read()
        own = self._staying.get(graph.signature)
        found = self._shares.get(graph.shape, 0) * graph.nbytes if own is None else own
        return int(min(found * scale, self._most.get(graph.shape, sys.maxsize)))

    def is_to_be_marked(self, graph: Measurable) -> bool:
        """Whether the times of the next step of the graph are to be taken. Called once for each step."""
        settled = self._settled.get(graph.signature)
        if settled is None or settled[0] < _NUM_SETTLED:
            return True
        settled[1] = 0 if settled[1] >= _NUM_UNMARKED else settled[1] + 1
        return not settled[1]

    def num_found(self) -> int:
        """How often `staying_bytes` of a graph has changed so far."""
        self._read()
        return self._num_found

    def _read(self) -> None:
        try:
            while True:
                graph, times = self._unread.popleft()
                if not times.is_over():
                    self._unread.appendleft((graph, times))
                    return
                self._learn(graph, times)
        except IndexError:
            pass  # no more

    def _learn(self, graph: Measurable, times: Any) -> None:
        before = self._staying.get(graph.signature)
        if times.refused_bytes:
            self._keep_less(graph, times)
            self._settled.pop(graph.signature, None)
        elif (measured := times.measured()) is not None:
            self._keep_more(graph, times, measured.uncovered_bytes())
            if self._staying.get(graph.signature) == before:
                self._settled.setdefault(graph.signature, [0, 0])[0] += 1
            else:
                self._settled.pop(graph.signature, None)
        for known in (self._staying, self._shares, self._most, self._settled):
            while len(known) > _MAX_GRAPHS:
                known.popitem(last=False)

    def _keep_less(self, graph: Measurable, times: Any) -> None:
        before = self._most.get(graph.shape, sys.maxsize)
        less = max(times.refused_bytes, times.staying_bytes // _LEAST_SHRINKING)
        self._most[graph.shape] = most = min(before, max(0, times.staying_bytes - less))
        self._num_found += most < before

    def _keep_more(self, graph: Measurable, times: Any, uncovered: int) -> None:
        if not uncovered:
            return
        spare = times.spare_bytes()
        more = uncovered if spare is None else min(uncovered, spare)
        most = self._most.get(graph.shape, sys.maxsize)
        staying_bytes = max(self._staying.get(graph.signature, 0), min(times.staying_bytes + more, most))
        fits = spare is None or spare >= graph.nbytes - times.staying_bytes
        if fits and 0 < graph.nbytes - staying_bytes <= graph.nbytes // _LEAST_LEAVING:
            staying_bytes = min(graph.nbytes, most)
        self._staying[graph.signature] = staying_bytes
        share = staying_bytes / max(graph.nbytes, 1)
        self._shares[graph.shape] = max(self._shares.get(graph.shape, 0), min(share, 1))
        self._num_found += 1

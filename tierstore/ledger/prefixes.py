"""The known graphs by what they begin with, so that a plan asks each of them once, not each about each other. Pure.

NOTE [Stretches]
The packs of all known graphs are cut where two graphs part, and where one ends. A *stretch* lies between two cuts. It
is found by its first pack: the signature there stands for all packs before it. Through a stretch the same graphs run
side by side, so what they agree on is found once for the plans of all of them. Tiers are a byte for each pack, with one
bit for each tier and none where nothing is decided, so what graphs agree on are the bits that they have in common. A
graph that is learned or forgotten changes only the stretches that it runs through. It changes them in a copy, so that
any thread may read meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import reduce
from operator import and_

from .plan import Trace

_MAX_BUDGETS = 4
"""For as many, what the graphs agree on is remembered."""


class Stretch:
    """Packs of some graphs, up to `end`, in which no two of these part and none ends. Never changed.

    Attributes:
        end: the number of packs up to its end.
        traces: the graphs, by the signature of all their packs.
    """

    __slots__ = ("_agreed", "end", "traces")

    def __init__(self, end: int, traces: Mapping[int, Trace]) -> None:
        self.end = end
        self.traces = traces
        self._agreed: dict[Hashable, bytes] = {}

    def agreed(self, start: int, key: Hashable, tiers_of: Callable[[int, Trace], bytes]) -> bytes:
        """The tiers that all its graphs give to its packs, which begin with pack `start`.

        `tiers_of`: gives the tiers of a graph; `key` tells what they depend on."""
        found = self._agreed.get(key)
        if found is None:
            each = (tiers_of(whole, trace)[start : self.end] for whole, trace in self.traces.items())
            found = reduce(and_, map(int.from_bytes, each)).to_bytes(self.end - start)
            if len(self._agreed) >= _MAX_BUDGETS:
                self._agreed = {}
            self._agreed[key] = found
        return found


class Prefixes:
    """Known graphs, and their stretches: see NOTE [Stretches]. Never changed.

    `traces`: the graphs, by the signature of all their packs."""

    def __init__(
        self, traces: Mapping[int, Trace] | None = None, stretches: Mapping[tuple[int, int], Stretch] | None = None
    ) -> None:
        self.traces = traces or {}
        self._stretches = stretches or {}

    def beginning(self, num_packs: int, signature: int) -> Mapping[int, Trace]:
        """The graphs that begin with these packs."""
        stretch = self._stretches.get((num_packs - 1, signature))
        if stretch is not None:
            return stretch.traces
        return {whole: trace for whole, trace in self.traces.items() if trace.continues(num_packs, signature)}

    def stretch_with(self, trace: Trace, index: int, start: int = 0) -> tuple[int, Stretch]:
        """Where the stretch of pack `index` of that graph begins, and that stretch.

        `start`: where a stretch of that graph begins, which is not behind the pack: the search begins there."""
        signatures = trace.signatures
        while (stretch := self._stretches[start, signatures[start]]).end <= index:
            start = stretch.end
        return start, stretch

    def with_trace(self, trace: Trace) -> Prefixes:
        """These and that graph, which is not among them."""
        whole, stretches, start = trace.signatures[-1], dict(self._stretches), 0
        while start < len(trace):
            key = start, trace.signatures[start]
            known = stretches.get(key)
            if known is None:
                stretches[key] = Stretch(len(trace), {whole: trace})
                break
            other = next(iter(known.traces.values()))
            end = trace.length_in_common(other, start + 1, known.end)
            if end < known.end:
                stretches[end, other.signatures[end]] = Stretch(known.end, known.traces)
            stretches[key] = Stretch(end, {**known.traces, whole: trace})
            start = end
        return Prefixes({**self.traces, whole: trace}, stretches)

    def without(self, whole: int) -> Prefixes:
        """These but for one graph."""
        trace, stretches, start, last = self.traces[whole], dict(self._stretches), 0, None
        while start < len(trace):
            key = start, trace.signatures[start]
            known = stretches.pop(key)
            start = known.end
            if len(known.traces) > 1:
                stretches[key] = Stretch(known.end, _without(known.traces, whole))
                last = key
        if last is not None:
            _join_next(stretches, last)
        return Prefixes(_without(self.traces, whole), stretches)


def _without(traces: Mapping[int, Trace], whole: int) -> dict[int, Trace]:
    return {each: trace for each, trace in traces.items() if each != whole}


def _join_next(stretches: dict[tuple[int, int], Stretch], key: tuple[int, int]) -> None:
    """Make that stretch and the next one a single one, if the same graphs run through both."""
    stretch = stretches[key]
    other = next(iter(stretch.traces.values()))
    if stretch.end < len(other):
        next_key = stretch.end, other.signatures[stretch.end]
        following = stretches[next_key]
        if len(following.traces) == len(stretch.traces):
            del stretches[next_key]
            stretches[key] = Stretch(following.end, following.traces)

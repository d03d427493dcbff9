"""Searches settings by their predicted step time. Pure: predictions come from a function that the caller gives.

Only what was ever measured to be faster is searched: `host_bytes`, `staging_bytes`, the codec, and deeper queues. Host
budgets are tried first. Then settings are changed one at a time from the best point, in a few passes. The order of
backward is learned and followed as far as there is room: other orders, a fixed distance, shallower queues and other
limits of LMDB were never faster (docs/project/internals/measurements.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from .settings import LEAST_STAGING_BYTES, USUAL_STAGING_BYTES, TrialSettings, working_bytes

CODECS = ("auto", "none", "zstd:1", "shuffle-zstd:1")
IO_DEPTHS = (4, 8, 16)
_NUM_OTHER_CODECS = 2
_SHARES = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0)
_TIE = 1.005
"""Predictions within this factor of the best tie with it; then less memory is better."""
_MOST_PASSES = 4

Predict = Callable[[TrialSettings], float | None]
"""Predicts the seconds of a step; None: the step would fail."""


@dataclass(frozen=True)
class Space:
    """The settings that may be tried; all sequences rise. `memory_bytes`: the most for `host_bytes`, `staging_bytes`
    and `working_bytes(io_depth)` together. `saved_bytes`: that a step saves; a larger host budget has no further
    effect."""

    memory_bytes: int
    saved_bytes: int

    def most_host_bytes(self, staging_bytes: int, io_depth: int) -> int:
        return self.memory_bytes - staging_bytes - working_bytes(io_depth)

    def hosts(self, settings: TrialSettings) -> Sequence[int]:
        most = self.most_host_bytes(settings.staging_bytes, settings.io_depth)
        return sorted({int(min(most, self.saved_bytes) * share) for share in _SHARES} | {most})

    def windows(self) -> Sequence[int]:
        sizes = (USUAL_STAGING_BYTES // 4, USUAL_STAGING_BYTES // 2, USUAL_STAGING_BYTES, 2 * USUAL_STAGING_BYTES)
        return [size for size in sizes if LEAST_STAGING_BYTES <= size <= self.memory_bytes]


@dataclass(frozen=True)
class Found:
    """The result of a search. `predicted`: step seconds of all settings that were tried; None: the step would fail."""

    predicted: Mapping[TrialSettings, float | None]

    def best(self, number: int) -> list[TrialSettings]:
        """At most `number` settings that are worth measuring: the best; the fastest, if that is another, with more
        memory; the best with other codecs, since predictions know least about those; then others with different
        predicted times."""
        ranked = _ranked(self.predicted)
        chosen = dict.fromkeys(ranked[:1] + sorted(ranked, key=self._seconds)[:1])
        coded = [replace(each, codec=codec) for each in ranked[:1] for codec in CODECS if codec != each.codec]
        chosen |= dict.fromkeys(sorted(coded, key=self._seconds)[:_NUM_OTHER_CODECS])
        by_seconds: dict[str, TrialSettings] = {}
        for settings in ranked:
            by_seconds.setdefault(f"{self.predicted[settings]:.3g}", settings)
        return list(chosen | dict.fromkeys(by_seconds.values()))[:number]

    def _seconds(self, settings: TrialSettings) -> float:
        seconds = self.predicted.get(settings)
        return inf if seconds is None else seconds


def search(space: Space, known: Sequence[TrialSettings], predict: Predict, goes_on: Callable[[], bool]) -> Found:
    """Search the space. `known`: settings within the space, predicted in any case; the search begins at the first, with
    the order learned. `goes_on`: asked before each other prediction; False ends the search with what was found so far.
    """
    start = replace(known[0], prefetch="learned", lookahead_bytes=None)
    predicted = {settings: predict(settings) for settings in known}
    candidates = [replace(start, host_bytes=host) for host in space.hosts(start)]
    for _ in range(1 + _MOST_PASSES):
        for candidate in candidates:
            if candidate not in predicted:
                if not goes_on():
                    return Found(predicted)
                predicted[candidate] = predict(candidate)
        candidates = [nearby for best in _ranked(predicted)[:1] for nearby in _nearby(space, best)]
    return Found(predicted)


def _nearby(space: Space, best: TrialSettings) -> list[TrialSettings]:
    """Settings that differ from `best` in one value. If the window or the depth changes, `host_bytes` is also tried
    at the most that the limit leaves, and lowered to that if needed."""
    nearby = [replace(best, codec=codec) for codec in CODECS]
    moved = [replace(best, staging_bytes=window) for window in space.windows()]
    for each in moved + [replace(best, io_depth=depth) for depth in IO_DEPTHS]:
        most = space.most_host_bytes(each.staging_bytes, each.io_depth)
        nearby += [replace(each, host_bytes=host) for host in (min(each.host_bytes, most), most) if most >= 0]
    return nearby + [replace(best, host_bytes=host) for host in space.hosts(best)]


def _ranked(predicted: Mapping[TrialSettings, float | None]) -> list[TrialSettings]:
    """The best first. Those that tie with the best are sorted by memory, then by which was tried first."""
    sound = {settings: seconds for settings, seconds in predicted.items() if seconds is not None}
    tied_seconds = _TIE * min(sound.values(), default=0.0)

    def rank(settings: TrialSettings) -> tuple[float, int]:
        seconds = 0.0 if sound[settings] <= tied_seconds else sound[settings]
        return seconds, settings.memory_bytes

    return sorted(sound, key=rank)

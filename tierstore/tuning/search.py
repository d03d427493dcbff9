"""Searches settings by their predicted step time. Pure: who predicts is a function.

The space is small and smooth enough that no optimizer is needed: two sizes are tried on a grid, which is also the heat
map, and then each other setting in turn from the best point, as long as that gains something. The two are `host_bytes`
and `lookahead_bytes`, or `device_bytes`, where some of that is allowed on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from .settings import AUTO, LEAST_STAGING_BYTES, USUAL_STAGING_BYTES, TrialSettings, working_bytes

__all__ = ["CODECS", "IO_DEPTHS", "PREFETCHES", "Found", "Predict", "Space", "search"]

CODECS = ("auto", "none", "zstd:1", "shuffle-zstd:1")
PREFETCHES = ("learned", "reverse")
IO_DEPTHS = (2, 4, 8, 16)
_NUM_OTHER_CODECS = 2
_SHARES = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0)
_TIE = 1.005
"""Predictions this close are the same: then less memory is better."""
_MOST_PASSES = 4

Predict = Callable[[TrialSettings], float | None]
"""Seconds of a step; None: the step would fail."""


@dataclass(frozen=True)
class Space:
    """What may be tried.

    Attributes:
        memory_bytes: the most that `host_bytes` and `staging_bytes` may be together, and what depth takes beyond the
            usual one.
        saved_bytes: of one step: a larger lookahead, or host budget, does nothing more.
        device_bytes: the most that `device_bytes` may be and does anything.
    """

    memory_bytes: int
    saved_bytes: int
    device_bytes: int = 0

    def most_host_bytes(self, staging_bytes: int, io_depth: int) -> int:
        """What the limit leaves beside this window at this depth; below 0: they cannot be had together."""
        return self.memory_bytes - staging_bytes - working_bytes(io_depth)

    def hosts(self, staging_bytes: int, io_depth: int) -> Sequence[int]:
        """Host budgets to try beside this window, rising."""
        most = self.most_host_bytes(staging_bytes, io_depth)
        useful = min(most, self.saved_bytes)
        return sorted({int(useful * share) for share in _SHARES} | {most})

    @property
    def lookaheads(self) -> Sequence[int | None]:
        """Distances to try; the last is "as far as it takes"."""
        return (*sorted({int(self.saved_bytes * share) for share in _SHARES if share}), None)

    @property
    def devices(self) -> Sequence[int]:
        """`device_bytes` to try, rising."""
        return sorted({int(self.device_bytes * share) for share in _SHARES})

    def windows(self) -> Sequence[int]:
        """Staging windows to try, rising."""
        sizes = (USUAL_STAGING_BYTES // 4, USUAL_STAGING_BYTES // 2, USUAL_STAGING_BYTES, 2 * USUAL_STAGING_BYTES)
        return [size for size in sizes if LEAST_STAGING_BYTES <= size <= self.memory_bytes]


@dataclass(frozen=True)
class Found:
    """What a search has seen.

    Attributes:
        predicted: step seconds of everything that was tried; None: it would fail, or nobody knows.
        hosts, downs: of the heat map: `host_bytes`, and values of the setting `down`. The others are those of `start`.
        start: where the search began.
        is_whole: it was not cut short.
        down: of the heat map.
    """

    predicted: Mapping[TrialSettings, float | None]
    hosts: Sequence[int]
    downs: Sequence[int | None]
    start: TrialSettings
    is_whole: bool
    down: Literal["lookahead_bytes", "device_bytes"] = "lookahead_bytes"

    def at(self, host_bytes: int, down: int | None) -> float | None:
        """The heat map there, in seconds; None: not known."""
        return self.predicted.get(_with(self.start, {"host_bytes": host_bytes, self.down: down}))

    def best(self, number: int) -> list[TrialSettings]:
        """So many that are worth measuring.

        First the best; then the fastest, where that takes more memory; then the best with other codecs, since what a
        codec makes of a program's tensors is what a prediction knows least of; then those that are predicted to differ.
        """
        ranked = _ranked(self.predicted)
        chosen = dict.fromkeys(ranked[:1] + sorted(ranked, key=self._seconds)[:1])
        coded = [replace(each, codec=codec) for each in ranked[:1] for codec in CODECS if codec != each.codec]
        chosen |= dict.fromkeys(sorted(coded, key=self._seconds)[:_NUM_OTHER_CODECS])
        by_seconds: dict[str, TrialSettings] = {}
        for settings in ranked:
            by_seconds.setdefault(f"{self.predicted[settings]:.3g}", settings)
        return list(chosen | dict.fromkeys(by_seconds.values()))[:number]

    def _seconds(self, settings: TrialSettings) -> float:
        """Predicted; infinite where that is not known, or it would fail."""
        seconds = self.predicted.get(settings)
        return inf if seconds is None else seconds


def search(space: Space, known: Sequence[TrialSettings], predict: Predict, goes_on: Callable[[], bool]) -> Found:
    """Try what may be tried.

    Args:
        space: what may be tried.
        known: settings within the space, predicted in any case; the search begins at the first.
        predict: see `Predict`.
        goes_on: asked before each other prediction; False: what was found by then is it.
    """
    start = known[0]
    predicted = {settings: predict(settings) for settings in known}
    hosts = space.hosts(start.staging_bytes, start.io_depth)
    down: Literal["lookahead_bytes", "device_bytes"] = "device_bytes" if space.device_bytes else "lookahead_bytes"
    downs: Sequence[int | None] = space.devices if space.device_bytes else space.lookaheads
    grid = [_with(start, {"host_bytes": host, down: value}) for value in downs[::-1] for host in hosts]
    is_whole = _try(grid, predicted, predict, goes_on)
    for _ in range(_MOST_PASSES):
        best = _ranked(predicted)[:1]
        if not is_whole or not best or not (nearby := _untried(space, best[0], predicted)):
            break
        is_whole = _try(nearby, predicted, predict, goes_on)
    return Found(predicted, hosts, downs, start, is_whole, down)


def _with(settings: TrialSettings, changes: Mapping[str, Any]) -> TrialSettings:
    return replace(settings, **changes)


def _try(
    candidates: Iterable[TrialSettings],
    predicted: dict[TrialSettings, float | None],
    predict: Predict,
    goes_on: Callable[[], bool],
) -> bool:
    """Predict all that are not known. False: it was told to stop."""
    for candidate in candidates:
        if candidate not in predicted:
            if not goes_on():
                return False
            predicted[candidate] = predict(candidate)
    return True


def _untried(space: Space, best: TrialSettings, known: Mapping[TrialSettings, float | None]) -> list[TrialSettings]:
    """One setting changed; another window, or depth, takes from the host budget what it needs, or gives it the rest."""
    nearby = [replace(best, codec=codec) for codec in CODECS]
    nearby += [replace(best, prefetch=prefetch) for prefetch in PREFETCHES if best.device_bytes != AUTO]
    nearby += [replace(best, lookahead_bytes=lookahead) for lookahead in space.lookaheads]
    nearby += [replace(best, device_bytes=device) for device in space.devices if space.device_bytes]
    moved = [replace(best, staging_bytes=window) for window in space.windows()]
    moved += [replace(best, io_depth=depth) for depth in IO_DEPTHS]
    nearby += [
        replace(each, host_bytes=host)
        for each in moved
        if (most := space.most_host_bytes(each.staging_bytes, each.io_depth)) >= 0
        for host in (min(each.host_bytes, most), most)
    ]
    nearby += [replace(best, host_bytes=host) for host in space.hosts(best.staging_bytes, best.io_depth)]
    return [each for each in nearby if each not in known]


def _ranked(predicted: Mapping[TrialSettings, float | None]) -> list[TrialSettings]:
    """The best first; of those that tie with the best, the one with the least memory, of the accelerator before that of
    the host; then what was tried first."""
    sound = {settings: seconds for settings, seconds in predicted.items() if seconds is not None}
    tied_seconds = _TIE * min(sound.values(), default=0.0)
    return sorted(
        sound,
        key=lambda settings: (
            0.0 if sound[settings] <= tied_seconds else sound[settings],
            settings.simulated.device_bytes,
            settings.memory_bytes,
        ),
    )

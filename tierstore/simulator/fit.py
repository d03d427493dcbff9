"""Fits to a few real steps what only they show: how much the store's work slows training down. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import NamedTuple

from ..errors import ConfigError
from .hardware import Hardware
from .simulate import Settings, simulate
from .workload import Workload

__all__ = ["Observation", "fit", "steady_seconds"]

_TRIED = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_NUM_REFINEMENTS = 5
_NUM_STEPS = 4


class Observation(NamedTuple):
    """The time of a real step: the median of steps after the first. `workload`: with compute times as they are when
    nothing leaves memory."""

    workload: Workload
    settings: Settings
    step_seconds: float


def steady_seconds(workload: Workload, hardware: Hardware, settings: Settings) -> float:
    """The median time of simulated steps after the first, which teaches the order. Raises as `simulate`."""
    steps = simulate(workload, hardware, settings, num_steps=_NUM_STEPS)[0]
    return statistics.median(step.seconds for step in steps[1:])


def fit(hardware: Hardware, observed: Sequence[Observation]) -> Hardware:
    """The same machine with the contention, from 0 to 8, that brings simulated steps nearest to the observed ones.

    The error is the mean of the logarithms of simulated to observed time, without sign, so one disturbed step does not
    dominate. Steps in which nothing moves contribute nothing. Simulates each observation up to 16 times.

    Raises ConfigError: there is no observation, or one took no time. StoreFullError: in a simulation, the store would
    be.
    """
    if not observed or any(not each.step_seconds > 0 for each in observed):
        raise ConfigError("observed", [each.step_seconds for each in observed], "give steps that took some time")

    def error_of(contention: float) -> float:
        tried = replace(hardware, contention=contention)
        return statistics.fmean(
            abs(log(steady_seconds(each.workload, tried, each.settings) / each.step_seconds)) for each in observed
        )

    errors = {contention: error_of(contention) for contention in _TRIED}
    for _ in range(_NUM_REFINEMENTS):  # halfway from the best to its neighbours
        tried, best = sorted(errors), min(errors, key=errors.__getitem__)
        place = tried.index(best)
        for neighbour in tried[max(0, place - 1) : place + 2]:
            between = (neighbour + best) / 2
            if between not in errors:
                errors[between] = error_of(between)
    return replace(hardware, contention=min(errors, key=errors.__getitem__))

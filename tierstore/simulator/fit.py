"""Fits to a real step what only that shows: how much the store's work slows training down. Pure."""

from __future__ import annotations

import statistics
from dataclasses import replace
from math import log

from ..errors import ConfigError
from .hardware import Hardware
from .simulate import Settings, simulate
from .workload import Workload

__all__ = ["fit", "steady_seconds"]

_TRIED = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_NUM_REFINEMENTS = 5
_NUM_STEPS = 4


def steady_seconds(workload: Workload, hardware: Hardware, settings: Settings) -> float:
    """The median time of simulated steps after the first, which teaches the order. Raises as `simulate`."""
    steps = simulate(workload, hardware, settings, num_steps=_NUM_STEPS)[0]
    return statistics.median(step.seconds for step in steps[1:])


def fit(hardware: Hardware, workload: Workload, settings: Settings, step_seconds: float) -> Hardware:
    """The same machine with the contention, from 0 to 8, that brings simulated steps nearest to the observed one.

    `step_seconds`: the median of real steps after the first. Simulates up to 16 times. Raises ConfigError: it took no
    time. StoreFullError: in a simulation, the store would be.
    """
    if not step_seconds > 0:
        raise ConfigError("step_seconds", step_seconds, "give a step that took some time")

    def error_of(contention: float) -> float:
        seconds = steady_seconds(workload, replace(hardware, contention=contention), settings)
        return abs(log(seconds / step_seconds))

    errors = {contention: error_of(contention) for contention in _TRIED}
    for _ in range(_NUM_REFINEMENTS):  # halfway from the best to its neighbours
        tried, best = sorted(errors), min(errors, key=errors.__getitem__)
        place = tried.index(best)
        for neighbour in tried[max(0, place - 1) : place + 2]:
            between = (neighbour + best) / 2
            if between not in errors:
                errors[between] = error_of(between)
    return replace(hardware, contention=min(errors, key=errors.__getitem__))

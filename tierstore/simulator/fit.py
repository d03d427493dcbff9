"""Fits to a few real steps what only they show: how much the store's work slows training down, and how fast copies
from and to an accelerator are while it trains. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from typing import NamedTuple

from ..errors import ConfigError
from .hardware import Hardware
from .simulate import Settings, simulate
from .workload import Workload

__all__ = ["Observation", "fit", "fit_link", "steady_seconds"]

_TRIED = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_TRIED_FACTORS = (1.0, 0.25, 0.5, 0.75, 1.25, 1.5, 2.0, 4.0)
"""If two give the same error, the first is taken."""
_NUM_REFINEMENTS = 5
_NUM_STEPS = 4


class Observation(NamedTuple):
    """The time of a real step.

    Attributes:
        workload: the step, with compute times as they are when nothing leaves memory.
        settings: the settings that it ran with.
        step_seconds: the median of steps after the first, which teaches the order.
    """

    workload: Workload
    settings: Settings
    step_seconds: float


def steady_seconds(workload: Workload, hardware: Hardware, settings: Settings) -> float:
    """The median time of simulated steps after the first, which teaches the order.

    Raises:
        ConfigError, StoreFullError: see `simulate`.
    """
    steps = simulate(workload, hardware, settings, num_steps=_NUM_STEPS)[0]
    return statistics.median(step.seconds for step in steps[1:])


def fit(hardware: Hardware, observed: Sequence[Observation]) -> Hardware:
    """The same machine with the contention, from 0 to 8, that brings simulated steps nearest to the observed ones.

    The error is the mean of the logarithms of simulated to observed time, without sign, so one disturbed step does not
    dominate. Steps in which nothing moves contribute nothing. Simulates each observation up to 16 times.

    Args:
        hardware: as it was measured; its contention is ignored.
        observed: at least one, of this machine.

    Raises:
        ConfigError: there is no observation, or one took no time.
        StoreFullError: in one of the simulations, the store would be full.
    """
    return replace(
        hardware,
        contention=_least(_TRIED, lambda contention: _error(replace(hardware, contention=contention), observed)),
    )


def fit_link(hardware_at: Callable[[float], Hardware], observed: Sequence[Observation]) -> float:
    """The factor on the speed of copies, from 1/4 to 4, that brings simulated steps nearest to the observed ones.

    The factor is 1 if no step waits for copies. Otherwise as `fit`.

    Args:
        hardware_at: returns the machine with the speed of copies multiplied by a factor.
        observed: at least one.
    """
    return _least(_TRIED_FACTORS, lambda factor: _error(hardware_at(factor), observed))


def _error(hardware: Hardware, observed: Sequence[Observation]) -> float:
    """The mean error of all observations: see `fit`. Raises as `fit`."""
    if not observed or any(not each.step_seconds > 0 for each in observed):
        raise ConfigError("observed", [each.step_seconds for each in observed], "give steps that took some time")
    return statistics.fmean(
        abs(log(steady_seconds(each.workload, hardware, each.settings) / each.step_seconds)) for each in observed
    )


def _least(tried: Sequence[float], error_of: Callable[[float], float]) -> float:
    """The argument with the least error. Tries a few, then again and again halfway from the best to its neighbours."""
    errors = {argument: error_of(argument) for argument in tried}
    for _ in range(_NUM_REFINEMENTS):
        arguments, best = sorted(errors), min(errors, key=errors.__getitem__)
        place = arguments.index(best)
        for neighbour in arguments[max(0, place - 1) : place + 2]:
            between = (neighbour + best) / 2
            if between not in errors:
                errors[between] = error_of(between)
    return min(errors, key=errors.__getitem__)

"""What only real steps show, fitted to a few of them: how much training suffers beside the store, and how fast copies
from and to an accelerator are beside it. Pure."""

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
"""Of two that come as near, the first is taken."""
_NUM_REFINEMENTS = 5
_NUM_STEPS = 4


class Observation(NamedTuple):
    """What a real step took.

    Attributes:
        workload: of the step, its compute as it is where nothing leaves memory.
        settings: that it ran with.
        step_seconds: once the order is known; of several steps the median.
    """

    workload: Workload
    settings: Settings
    step_seconds: float


def steady_seconds(workload: Workload, hardware: Hardware, settings: Settings) -> float:
    """What a simulated step takes once the order is known: the median of those after the first.

    Raises:
        ConfigError, StoreFullError: see `simulate`.
    """
    steps = simulate(workload, hardware, settings, num_steps=_NUM_STEPS)[0]
    return statistics.median(step.seconds for step in steps[1:])


def fit(hardware: Hardware, observed: Sequence[Observation]) -> Hardware:
    """The same machine with the contention, of 0 to 8, that brings simulated steps nearest to the observed ones.

    Nearest: the mean of the errors, as logarithms of the ratio, so that one step that was disturbed counts no more
    than its share. Steps in which nothing moves tell nothing. Simulates each of them some twenty times.

    Args:
        hardware: as it was measured; its contention is not looked at.
        observed: at least one, of this machine.

    Raises:
        ConfigError: there is none, or one that took no time.
        StoreFullError: the store of one would have been full.
    """
    return replace(
        hardware,
        contention=_least(_TRIED, lambda contention: _error(replace(hardware, contention=contention), observed)),
    )


def fit_link(hardware_at: Callable[[float], Hardware], observed: Sequence[Observation]) -> float:
    """The factor on the speed of copies, of 1/4 to 4, that brings simulated steps nearest to the observed ones.

    Of steps that no copy holds up, 1. Otherwise as `fit`.

    Args:
        hardware_at: the machine, with copies so many times as fast.
        observed: at least one.
    """
    return _least(_TRIED_FACTORS, lambda factor: _error(hardware_at(factor), observed))


def _error(hardware: Hardware, observed: Sequence[Observation]) -> float:
    """The mean of all, as logarithms. Raises as `fit`."""
    if not observed or any(not each.step_seconds > 0 for each in observed):
        raise ConfigError("observed", [each.step_seconds for each in observed], "give steps that took some time")
    return statistics.fmean(
        abs(log(steady_seconds(each.workload, hardware, each.settings) / each.step_seconds)) for each in observed
    )


def _least(tried: Sequence[float], error_of: Callable[[float], float]) -> float:
    """The argument of the least error: the best of a few, then halfway to its neighbours, again and again."""
    errors = {argument: error_of(argument) for argument in tried}
    for _ in range(_NUM_REFINEMENTS):
        arguments, best = sorted(errors), min(errors, key=errors.__getitem__)
        place = arguments.index(best)
        for neighbour in arguments[max(0, place - 1) : place + 2]:
            between = (neighbour + best) / 2
            if between not in errors:
                errors[between] = error_of(between)
    return min(errors, key=errors.__getitem__)

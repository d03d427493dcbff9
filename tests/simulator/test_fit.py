"""From steps that a known machine would take, the fit finds that machine again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierstore.errors import ConfigError
from tierstore.simulator import (
    Action,
    Compute,
    DepthSpeed,
    Drive,
    EndScope,
    Hardware,
    Pack,
    Release,
    Saved,
    Settings,
    Unpack,
    Workload,
)
from tierstore.simulator.fit import Observation, fit, steady_seconds

_MIB = 2**20
_MACHINE = Hardware(
    Drive([DepthSpeed(1, 2e9)], [DepthSpeed(1, 2e9)]), cores=2, cpu_seconds_per_record=1e-3, cpu_seconds_per_byte=1e-10
)
_BUDGETS = (0, 64 * _MIB)


def _chain(num: int, gap: float) -> Workload:
    actions: list[Action] = []
    for index in range(num):
        actions += [Compute(gap), Pack(index)]
    actions.append(EndScope())
    for index in reversed(range(num)):
        actions += [Unpack(index), Compute(2 * gap), Release(index)]
    return Workload([Saved(16 * _MIB, node) for node in range(num)], actions)


def _observed(contention: float, disturbed: float = 1.0) -> list[Observation]:
    """Steps of two workloads; the last one took longer by that factor."""
    machine = replace(_MACHINE, contention=contention)
    steps = [
        Observation(workload, settings, steady_seconds(workload, machine, settings))
        for workload in (_chain(12, 0.02), _chain(16, 0.03))
        for settings in map(Settings, _BUDGETS)
    ]
    return [*steps[:-1], steps[-1]._replace(step_seconds=disturbed * steps[-1].step_seconds)]


@pytest.mark.parametrize("contention", [0.0, 0.7, 3.0])
def test_fit_steps_of_a_known_machine_finds_its_contention(contention: float) -> None:
    found = fit(_MACHINE, _observed(contention))
    assert found.contention == pytest.approx(contention, abs=0.1)
    assert replace(found, contention=1.0) == _MACHINE


def test_fit_one_step_that_was_disturbed_hardly_moves_it() -> None:
    found = fit(_MACHINE, _observed(2.0, disturbed=1.5))
    assert found.contention == pytest.approx(2.0, abs=0.3)


def test_fit_what_the_hardware_said_before_does_not_count() -> None:
    observed = _observed(1.0)
    assert fit(replace(_MACHINE, contention=9.0), observed) == fit(_MACHINE, observed)


@pytest.mark.parametrize("seconds", [None, 0.0, -1.0, float("nan")])
def test_fit_no_step_or_one_without_time_is_refused(seconds: float | None) -> None:
    steps = [] if seconds is None else [Observation(_chain(1, 0.1), Settings(0), seconds)]
    with pytest.raises(ConfigError):
        fit(_MACHINE, steps)

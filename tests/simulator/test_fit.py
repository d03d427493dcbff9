"""From steps that a known machine would take, the fit finds that machine again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulator.made_up import chain, drive
from tierstore.errors import ConfigError
from tierstore.simulator import Hardware, Observation, Settings, fit, steady_seconds

_MIB = 2**20
_MACHINE = Hardware(drive(2e9), cores=2, cpu_seconds_per_record=1e-3, cpu_seconds_per_byte=1e-10)
_BUDGETS = (0, 64 * _MIB)


def _observed(contention: float, disturbed: float = 1.0) -> list[Observation]:
    """Steps of two workloads; the last one took longer by that factor."""
    machine = replace(_MACHINE, contention=contention)
    steps = [
        Observation(workload, settings, steady_seconds(workload, machine, settings))
        for workload in (chain([16 * _MIB] * 12, 0.02), chain([16 * _MIB] * 16, 0.03))
        for settings in map(Settings, _BUDGETS)
    ]
    return [*steps[:-1], steps[-1]._replace(step_seconds=disturbed * steps[-1].step_seconds)]


@pytest.mark.parametrize("contention", [0.0, 0.7, 3.0])
def test_fit_steps_of_a_known_machine_finds_its_contention(contention: float) -> None:
    found = fit(replace(_MACHINE, contention=9.0), _observed(contention))
    assert found.contention == pytest.approx(contention, abs=0.1)
    assert replace(found, contention=1.0) == _MACHINE


def test_fit_one_step_that_was_disturbed_hardly_moves_it() -> None:
    assert fit(_MACHINE, _observed(2.0, disturbed=1.5)).contention == pytest.approx(2.0, abs=0.3)


@pytest.mark.parametrize("seconds", [None, 0.0, -1.0, float("nan")])
def test_fit_no_step_or_one_without_time_is_refused(seconds: float | None) -> None:
    steps = [] if seconds is None else [Observation(chain([16 * _MIB], 0.1), Settings(0), seconds)]
    with pytest.raises(ConfigError):
        fit(_MACHINE, steps)

"""From a step that a known machine would take, the fit finds that machine again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulator.made_up import chain, drive
from tierstore.errors import ConfigError
from tierstore.simulator import Hardware, Settings, fit, steady_seconds

_MIB = 2**20
_MACHINE = Hardware(drive(2e9), cores=2, cpu_seconds_per_record=1e-3, cpu_seconds_per_byte=1e-10)


@pytest.mark.parametrize("contention", [0.0, 0.7, 3.0])
def test_fit_step_of_a_known_machine_finds_its_contention(contention: float) -> None:
    for workload in (chain([16 * _MIB] * 12, 0.02), chain([16 * _MIB] * 16, 0.03)):
        seconds = steady_seconds(workload, replace(_MACHINE, contention=contention), Settings(0))
        found = fit(replace(_MACHINE, contention=9.0), workload, Settings(0), seconds)
        assert found.contention == pytest.approx(contention, abs=0.1)
        assert replace(found, contention=1.0) == _MACHINE


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_fit_step_without_time_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError):
        fit(_MACHINE, chain([16 * _MIB], 0.1), Settings(0), seconds)

"""A simulated step, as a trace that is looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.made_up import GB, MIB, accelerator, chain, machine
from tierstore.errors import ConfigError, StoreFullError
from tierstore.planning import Prediction, predict, simulated_trace
from tierstore.simulator import Settings, simulate
from tierstore.simulator.from_hardware import hardware_of
from tierstore.tracing.steps import steps_of
from tierstore.tracing.summary import summarize

_HOW = Settings(host_bytes=128 * MIB)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_trace_of_simulated_steps_has_their_times_waits_levels_and_transfers(num_ranks: int) -> None:
    where = machine(0.6 * GB, 0.6 * GB)
    simulated = simulate(chain(), hardware_of(where.hardware), _HOW, num_ranks=num_ranks)[0]
    steps = steps_of(simulated_trace(chain(), where, _HOW, num_ranks=num_ranks))
    assert [step.number for step in steps] == [1, 2, 3]
    for step, expected in zip(steps, simulated, strict=True):
        assert step.is_whole
        assert (step.ended_ns - step.began_ns) / 1e9 == pytest.approx(expected.seconds)
        assert len(step.packs) == len(step.unpacks) == len(step.releases) == len(chain().saved)
        waited = {cause: sum(w.end_ns - w.began_ns for w in step.waits if w.cause == cause) for cause in _CAUSES}
        assert {cause: ns / 1e9 for cause, ns in waited.items()} == pytest.approx(dict(expected.stall_seconds))
        assert sum(waited.values()) > 0
        assert max(levels.host_bytes for levels in step.levels) == expected.host_bytes_peak
        assert max(levels.disk_bytes for levels in step.levels) == expected.disk_bytes_peak
        assert set(expected.transfers) <= {*step.spills, *step.restores}


_CAUSES = ("pack waits for budget", "unpack waits for restore")


def test_trace_of_a_simulated_step_on_a_slow_drive_says_that_it_waits_for_the_drive() -> None:
    simulated = simulated_trace(chain(), machine(0.3 * GB, 0.3 * GB), _HOW)
    summary = summarize(steps_of(simulated)[-1], simulated.header)
    assert all("waited for the drive" in line for line in summary.headline)
    outcome = predict(chain(), machine(0.3 * GB, 0.3 * GB), _HOW)
    assert isinstance(outcome, Prediction)
    assert summary.seconds == pytest.approx(outcome.seconds)


def test_trace_of_a_simulated_step_on_an_accelerator_has_its_copies_and_what_it_holds() -> None:
    workload, where = chain().on_accelerator(10.0), machine(accelerators=(accelerator(),))
    simulated = simulate(workload, hardware_of(where.hardware), _HOW)[0]
    for step, expected in zip(steps_of(simulated_trace(workload, where, _HOW)), simulated, strict=True):
        assert sum(copy.nbytes for copy in step.offloads) == expected.counters.offloaded_bytes > 0
        assert sum(copy.nbytes for copy in step.reloads) == expected.counters.reloaded_bytes > 0
        held_bytes = max(levels.device_bytes for levels in step.levels)
        assert 0 < held_bytes <= expected.device_bytes_peak, "without what is copied back"
    with pytest.raises(ConfigError, match="its file has none"):
        simulated_trace(workload, machine(), _HOW)


def test_trace_of_a_step_that_does_not_fit_is_refused() -> None:
    with pytest.raises(StoreFullError):
        simulated_trace(chain(), machine(), replace(_HOW, disk_bytes=16 * MIB))

"""How near predictions come: errors, ties and ranks by hand, and what is fitted to and judged."""

from pathlib import Path

import pytest

from bench.harness import Record
from bench.simulator_accuracy import (
    BENCHMARK,
    GRID,
    HELD_OUT,
    MACHINE,
    PLAIN,
    Predicted,
    conclude,
    is_tie,
    observations,
    on_drive,
    rank_correlation,
    settings_of,
    verdict,
)
from bench.tuning_workloads import SAVED_BYTES, WORKLOADS
from tierstore.base.defaults import NUM_SPILLS
from tierstore.simulator import DepthSpeed, Drive, Hardware, Workload


def _exact(*values: tuple[float, float]) -> list[Predicted]:
    """Predicted and measured, once each."""
    return [Predicted(predicted, (measured,)) for predicted, measured in values]


def test_errors_are_of_the_median_either_way() -> None:
    pairs = [Predicted(1.1, (0.5, 1.0, 9.0)), Predicted(0.5, (1.0,))]
    assert [pair.error_percent for pair in pairs] == pytest.approx([10.0, 50.0])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [((1.0, 2.0), (2.0, 3.0), True), ((1.0, 2.0), (2.1, 3.0), False), ((1.0, 9.0), (2.0, 3.0), True)],
)
def test_tie_is_where_measurements_overlap(one: tuple[float, ...], other: tuple[float, ...], expected: bool) -> None:
    assert is_tie(Predicted(0, one), Predicted(0, other)) is expected
    assert is_tie(Predicted(0, other), Predicted(0, one)) is expected


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (_exact((1, 10), (2, 20), (3, 30)), (1.0, 3)),
        (_exact((3, 10), (2, 20), (1, 30)), (-1.0, 3)),
        (_exact((1, 10), (3, 20), (2, 30)), (1 / 3, 3)),
        (_exact((1, 10), (1, 20)), (0.0, 1)),
        ([Predicted(2, (1.0, 2.0)), Predicted(1, (1.5, 3.0)), Predicted(3, (9.0,))], (1.0, 2)),
        (_exact((1, 10)), (0.0, 0)),
    ],
)
def test_rank_correlation_of_what_is_told_apart(pairs: list[Predicted], expected: tuple[float, int]) -> None:
    assert rank_correlation(pairs) == pytest.approx(expected)


def test_verdict_is_apart_for_the_model_that_is_held_out() -> None:
    fitted = {f"{name}: {what}": Predicted(1.2, (1.0,)) for name in WORKLOADS if name != HELD_OUT for what in GRID}
    held_out = {f"{HELD_OUT}: {what}": Predicted(1.0, (2.0,)) for what in GRID}
    found = verdict(fitted | held_out, 3.0)
    assert set(found) == set(BENCHMARK.concluded)
    assert found["simulator, fitted models"]["median_error_percent"] == pytest.approx(20)
    assert found["simulator, held-out models"]["median_error_percent"] == pytest.approx(50)
    assert found["always the mean, held-out models"]["median_error_percent"] == pytest.approx(50), "of the fitted ones"
    assert found["simulator, held-out models"]["contention"] == 3.0


def test_observations_are_of_the_drive_as_it_is_and_of_no_held_out_model() -> None:
    workloads = {name: Workload([], []) for name in WORKLOADS}
    times = {f"{name}: {what}": [1.0] for name in WORKLOADS for what in GRID}
    observed = observations(workloads, times)
    num_real = sum(setting.drive_bytes_per_second is None for setting in GRID.values())
    assert len(observed) == num_real * (len(WORKLOADS) - 1)
    assert all(each.workload is not workloads[HELD_OUT] for each in observed)


def test_paced_drive_is_simulated_as_it_is_paced() -> None:
    machine = Hardware(Drive([DepthSpeed(1, 1e9)], [DepthSpeed(1, 2e9)], 1.0, 1.0), cores=2)
    for name, setting in GRID.items():
        drive, settings = on_drive(machine, setting).drive, settings_of(HELD_OUT, setting)
        assert settings.host_bytes == int(setting.host_share * SAVED_BYTES[HELD_OUT])
        if "MB/s" not in name:
            assert drive is machine.drive
            continue
        speed = [DepthSpeed(1, float(name.split(", ")[1].removesuffix(" MB/s")) * 1e6)]
        assert (drive.writes, drive.reads, drive.write_latency_seconds, drive.num_at_once) == (speed, speed, 0, 1)
        assert settings.num_turns == NUM_SPILLS


def test_conclude_where_a_run_failed_concludes_nothing(tmp_path: Path) -> None:
    assert conclude([Record(f"{HELD_OUT}: {PLAIN}", 1, None, "it broke"), Record(MACHINE, 1, {})], tmp_path) == {}

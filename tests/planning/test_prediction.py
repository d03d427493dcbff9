"""What is predicted of made-up steps on made-up machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.made_up import GB, MIB, accelerator, chain, machine
from tierstore.errors import ConfigError
from tierstore.hardware import CodecSpeed
from tierstore.planning import Limit, Machine, Misfit, Prediction, predict
from tierstore.simulator import Settings, Workload, simulate
from tierstore.simulator.from_hardware import hardware_of

_STEP_BYTES = 40 * 16 * MIB
_SOME = Settings(host_bytes=128 * MIB)


def _predict(workload: Workload, where: Machine, how: Settings = _SOME, num_ranks: int = 1) -> Prediction:
    outcome = predict(workload, where, how, num_ranks=num_ranks)
    assert isinstance(outcome, Prediction)
    return outcome


def _refused(workload: Workload, where: Machine, how: Settings = _SOME, num_ranks: int = 1) -> Misfit:
    outcome = predict(workload, where, how, num_ranks=num_ranks)
    assert isinstance(outcome, Misfit)
    return outcome


def test_prediction_of_a_rank_is_the_simulation_s_last_step() -> None:
    where = machine(1 * GB, 2 * GB)
    step = simulate(chain(), hardware_of(where.hardware), _SOME)[0][-1]
    found = _predict(chain(), where)
    assert (found.seconds, found.stall_seconds) == (step.seconds, step.stall_seconds)
    assert (found.written_bytes, found.read_bytes) == (step.counters.written_bytes, step.counters.read_bytes)
    assert found.host_bytes_peak == step.host_bytes_peak
    assert found.staging_bytes_peak == step.staging_bytes_peak
    assert found.disk_bytes_peak == step.disk_bytes_peak


def test_prediction_in_memory_alone_moves_nothing_and_is_bound_by_nothing() -> None:
    found = _predict(chain(), machine(), Settings(host_bytes=2 * _STEP_BYTES))
    assert (found.written_bytes, found.disk_bytes_peak, found.limit) == (0, 0, "nothing")
    assert found.seconds == pytest.approx(found.compute_seconds)
    assert found.slowdown == pytest.approx(1)


_SLOW_CODEC = CodecSpeed(
    data="activations, float32",
    codec="zstd:1",
    ratio=0.5,
    encode_bytes_per_second=2e8,
    decode_bytes_per_second=2e8,
)


@pytest.mark.parametrize(
    ("where", "codec", "gap_seconds", "limit"),
    [
        (machine(), "none", 0.02, "nothing"),
        (machine(), "none", 0.004, "CPU"),  # of the calls that queue a record
        (machine(write=0.3 * GB), "none", 0.01, "drive writes"),
        (machine(read=0.3 * GB), "none", 0.01, "drive reads"),
        (machine(codecs=(_SLOW_CODEC,), cores=1.0), "zstd:1", 0.01, "CPU"),
        (machine(memory=0.4 * GB), "none", 0.02, "memory"),
    ],
)
def test_prediction_names_what_bounds_the_step(where: Machine, codec: str, gap_seconds: float, limit: Limit) -> None:
    found = _predict(chain(gap_seconds=gap_seconds), where, replace(_SOME, codec=codec))
    assert found.limit == limit
    assert (found.slowdown > 1.02) == (limit != "nothing") == bool(found.seconds_without)
    if found.seconds_without:
        assert found.seconds_without[limit] == min(found.seconds_without.values()) < found.seconds


def test_prediction_with_two_drives_is_that_of_one_twice_as_fast() -> None:
    one, two = (_predict(chain(), machine(write, read, num_drives=num)) for write, read, num in _SAME_SPEED)
    assert two == one


_SAME_SPEED = [(1.2 * GB, 1.6 * GB, 1), (0.6 * GB, 0.8 * GB, 2)]


def test_prediction_of_several_ranks_adds_up_and_shares_the_drive() -> None:
    one, four = (_predict(chain(), machine(1 * GB, 1 * GB), num_ranks=num) for num in (1, 4))
    assert four.written_bytes == pytest.approx(4 * one.written_bytes, rel=0.1)
    assert four.host_bytes_peak == 4 * one.host_bytes_peak
    assert four.seconds > 2 * one.seconds
    assert four.compute_seconds == pytest.approx(one.compute_seconds)


def test_prediction_of_more_ranks_than_cores_is_compared_with_compute_on_those_cores() -> None:
    found = _predict(chain(cores=4.0), machine(cores=4.0), Settings(host_bytes=2 * _STEP_BYTES), num_ranks=3)
    assert found.compute_seconds == pytest.approx(3 * chain().compute_seconds)
    assert found.limit == "nothing"


@pytest.mark.parametrize(
    ("capacity_bytes", "codec"), [(0, "none"), (100 * MIB, "none"), (760 * MIB, "none"), (100 * MIB, "auto")]
)
def test_drive_too_small_needs_the_least_that_works_and_less_is_refused(capacity_bytes: int, codec: str) -> None:
    def where(capacity_bytes: int) -> Machine:
        return machine(capacity_bytes=capacity_bytes, codecs=(_SLOW_CODEC,))

    how = replace(_SOME, codec=codec)
    misfit = _refused(chain(), where(capacity_bytes), how, num_ranks=2)
    assert (misfit.tier, misfit.available_bytes) == ("disk", capacity_bytes)
    assert misfit.needed_bytes > capacity_bytes
    _predict(chain(), where(misfit.needed_bytes), how, num_ranks=2)
    _refused(chain(), where(misfit.needed_bytes * 9 // 10), how, num_ranks=2)


def test_drive_just_large_enough_for_a_slow_step_but_not_for_a_faster_one_is_bound_all_the_same() -> None:
    sizes = [nbytes * MIB for nbytes in (64, 16, 64, 64, 64, 64, 4)]
    how = Settings(host_bytes=16 * MIB, staging_bytes=64 * MIB)
    found = _predict(chain(sizes), machine(0.2 * GB, 0.2 * GB, capacity_bytes=260 * MIB), how)
    assert found.limit == "drive reads"
    assert "drive writes" not in found.seconds_without, "then all that is saved is on the drive at once"


def test_disk_budget_beyond_the_drive_is_cut_to_it() -> None:
    misfit = _refused(chain(), machine(capacity_bytes=100 * MIB), replace(_SOME, disk_bytes=1000 * GB))
    assert misfit.available_bytes == 100 * MIB


def test_disk_budget_below_the_drive_is_kept_to() -> None:
    misfit = _refused(chain(), machine(), replace(_SOME, disk_bytes=64 * MIB), num_ranks=2)
    assert misfit.available_bytes == 128 * MIB


def test_host_memory_too_small_for_all_ranks_is_told() -> None:
    misfit = _refused(chain(), machine(memory_bytes=300 * MIB), num_ranks=2)
    assert (misfit.tier, misfit.available_bytes) == ("host memory", 300 * MIB)
    assert misfit.needed_bytes > 2 * 128 * MIB
    _predict(chain(), machine(memory_bytes=misfit.needed_bytes), num_ranks=2)
    _refused(chain(), machine(memory_bytes=misfit.needed_bytes - 1), num_ranks=2)


def test_codec_shrinks_what_is_written_by_the_figures_of_its_content() -> None:
    masks = CodecSpeed(
        data="masks", codec="zstd:1", ratio=0.125, encode_bytes_per_second=1e10, decode_bytes_per_second=1e10
    )
    quick = machine(codecs=(_SLOW_CODEC, masks))
    how = replace(_SOME, codec="zstd:1")
    ratios = {
        kind: _predict(chain(kind=kind), quick, how).written_bytes / _predict(chain(kind=kind), quick).written_bytes
        for kind in ("float32", "bool", "int64")
    }
    assert ratios == pytest.approx({"float32": 0.5, "bool": 0.125, "int64": 1.0}, rel=0.1)


@pytest.mark.parametrize("codecs", [(), (_SLOW_CODEC,)])
def test_codec_without_figures_is_refused(codecs: tuple[CodecSpeed, ...]) -> None:
    with pytest.raises(ConfigError, match="made-up") as caught:
        predict(chain(), machine(codecs=codecs), replace(_SOME, codec="zstd:7"))
    assert ("zstd:1" in caught.value.allowed) == bool(codecs)


def test_ranks_below_one_are_refused() -> None:
    with pytest.raises(ConfigError):
        predict(chain(), machine(), _SOME, num_ranks=0)


def test_prediction_on_an_accelerator_is_the_simulation_s_last_step() -> None:
    workload, where = chain().on_accelerator(10.0), machine(accelerators=(accelerator(),))
    step = simulate(workload, hardware_of(where.hardware), _SOME)[0][-1]
    found = _predict(workload, where)
    assert (found.seconds, found.link_wait_seconds) == (step.seconds, step.link_wait_seconds)
    moved = step.counters.offloaded_bytes, step.counters.reloaded_bytes, step.device_bytes_peak
    assert (found.offloaded_bytes, found.reloaded_bytes, found.device_bytes_peak) == moved
    assert all(moved)
    two = _predict(workload, where, num_ranks=2)
    assert two.offloaded_bytes == pytest.approx(2 * moved[0], rel=0.1)
    assert two.device_bytes_peak < 2 * moved[2], "of one"


@pytest.mark.parametrize(
    ("speed", "where", "limit"),
    [
        (1.0, machine(accelerators=(accelerator(0.5 * GB),)), "link"),
        (1.0, machine(0.2 * GB, accelerators=(accelerator(),)), "drive writes"),
        (1.0, machine(read=0.5 * GB, accelerators=(accelerator(),)), "drive reads"),
        (0.1, machine(accelerators=(accelerator(),)), "nothing"),
    ],
)
def test_prediction_on_an_accelerator_names_what_bounds_it(speed: float, where: Machine, limit: Limit) -> None:
    found = _predict(chain().on_accelerator(speed), where)
    assert found.limit == limit
    assert (limit == "nothing") == (not found.seconds_without)


def test_prediction_on_an_accelerator_that_keeps_everything_is_its_compute() -> None:
    found = _predict(chain().on_accelerator(4.0), machine(accelerators=(accelerator(1.0),)), _ON_DEVICE)
    assert (found.offloaded_bytes, found.written_bytes, found.limit) == (0, 0, "nothing")
    assert found.seconds == pytest.approx(chain().compute_seconds / 4)


_ON_DEVICE = replace(_SOME, device_bytes=_STEP_BYTES)


def test_accelerator_without_the_memory_for_it_is_too_small() -> None:
    where = machine(accelerators=(accelerator(memory_bytes=_STEP_BYTES - 1),))
    assert _refused(chain().on_accelerator(4.0), where, _ON_DEVICE) == Misfit(
        "accelerator", _STEP_BYTES, _STEP_BYTES - 1
    )
    not_known = machine(accelerators=(accelerator(memory_bytes=0),))
    assert _predict(chain().on_accelerator(4.0), not_known, _ON_DEVICE).limit == "nothing"


def test_step_on_an_accelerator_needs_a_machine_that_has_one() -> None:
    with pytest.raises(ConfigError, match="its file has none"):
        predict(chain().on_accelerator(4.0), machine(), _SOME)

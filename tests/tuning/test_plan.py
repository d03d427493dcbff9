"""What is predicted of made-up steps on made-up machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from tests.tuning.made_up import GB, MIB, accelerator, chain, machine
from tierstore.errors import ConfigError
from tierstore.hardware import CodecSpeed
from tierstore.simulator import Settings, Workload, simulate
from tierstore.simulator.from_hardware import hardware_of
from tierstore.tracing.events import Event, Gone, Header, Pack, Release, Scope, ScopeEnd, StoreSettings, Unpack
from tierstore.tracing.events import Machine as TracedMachine
from tierstore.tracing.reader import RecordedTrace
from tierstore.tuning.codecs import SAMPLES, sample_data_of_kind
from tierstore.tuning.machines import Machine
from tierstore.tuning.plan import Limit, Misfit, Prediction, answer, last_whole_step, planned_settings, predict

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
def test_drive_too_small_needs_what_a_step_holds_there_at_once(capacity_bytes: int, codec: str) -> None:
    def where(capacity_bytes: int) -> Machine:
        return machine(capacity_bytes=capacity_bytes, codecs=(_SLOW_CODEC,))

    how = replace(_SOME, codec=codec)
    misfit = _refused(chain(), where(capacity_bytes), how, num_ranks=2)
    assert (misfit.tier, misfit.available_bytes) == ("disk", capacity_bytes)
    assert misfit.needed_bytes > capacity_bytes
    _predict(chain(), where(misfit.needed_bytes), how, num_ranks=2)


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


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("float32", "activations, float32"),
        ("float16", "activations, bfloat16"),
        ("float32, many zeros", "relu outputs"),
        ("bool, many zeros", "masks"),
        ("float32 ReluBackward0, many zeros", "relu outputs"),
        ("float64, all zeros", "zeros"),
        ("int64", "noise"),
        ("", "noise"),
    ],
)
def test_kind_of_content_has_sample_data_that_a_doctor_knows(kind: str, data: str) -> None:
    assert sample_data_of_kind(kind) == data
    assert data in SAMPLES


def test_costs_are_what_day_and_night_write_beside_what_the_drives_are_rated_for() -> None:
    rated = machine(1 * GB, 1 * GB, capacity_bytes=2 * 10**12, num_drives=2, rated_written_bytes=10**15)
    found = answer(chain(), rated, _SOME, 1)
    costs, moved = found["costs"], found["prediction"]
    day_bytes = moved["written_bytes"] * 86_400 / moved["seconds"]
    assert costs["written_bytes_per_year"] == pytest.approx(365 * day_bytes)
    assert costs["drive_writes_per_day"] == pytest.approx(day_bytes / 4e12), "of both drives"
    assert costs["years_to_rating"] == pytest.approx(2e15 / costs["written_bytes_per_year"])
    assert answer(chain(), machine(1 * GB, 1 * GB), _SOME, 1)["costs"]["years_to_rating"] is None
    roomy = replace(_SOME, host_bytes=2 * _STEP_BYTES)
    assert answer(chain(), rated, roomy, 1)["costs"]["years_to_rating"] is None, "nothing is written"


# --- where settings come from -----------------------------------------------------------------------------------------

_HOST, _STAGING = 1000, 100
_THREAD = 7


def _trace(*, num_whole: int = 1, codec: str | None = "zstd:1", **changes: Any) -> RecordedTrace:
    """Some whole steps, and one that is not."""
    io_depth = changes.pop("io_depth", None)
    recorded = StoreSettings("/x", codec is None, _HOST, _STAGING, 5000, codec, 0, True, 3, 5, "buffered", io_depth)
    events: list[Event] = []
    for graph in range(num_whole + 1):
        at = 100 * graph
        pack = Pack(at + 1, at + 2, _THREAD, graph, graph, 0, graph, None, 0, graph, 0, 8, 8, "float32", "cpu", (2,))
        scope = Scope(at, _THREAD, "main", graph, 0, 0, "learned", _HOST + _STAGING, False)
        events += [structs.replace(scope, **changes), pack, ScopeEnd(at + 3, _THREAD, graph, False)]
        if graph < num_whole:
            events += [Unpack(at + 4, at + 5, _THREAD, graph, 0), Release(at + 6, graph, 0), Gone(at + 7, graph)]
    header = Header("tierstore trace", 1, 0, 0.0, 1, recorded, TracedMachine("x", 4, 0, {}))
    return RecordedTrace(header, events, is_complete=False)


def _settings(trace: RecordedTrace, **said: Any) -> Settings:
    return planned_settings(trace, last_whole_step(trace, "x"), said.pop("codec", None), **said)


def test_last_whole_step_is_not_the_one_that_was_cut_off() -> None:
    assert last_whole_step(_trace(num_whole=3), "x").number == 3
    with pytest.raises(ConfigError) as caught:
        last_whole_step(_trace(num_whole=0), "step.jsonl")
    assert caught.value.given == "step.jsonl"


def test_settings_are_those_of_the_trace_but_for_the_size_of_its_drive() -> None:
    expected = Settings(_HOST, _STAGING, None, "zstd:1", "learned", None, num_spill_lanes=3, num_restore_lanes=5)
    assert _settings(_trace()) == expected
    assert _settings(_trace(codec=None)).codec == "auto"
    assert _settings(_trace(device_bytes=300)).device_bytes == 300


@pytest.mark.parametrize(
    ("lookahead_bytes", "prefetch", "planned"),
    [(_HOST + _STAGING, "learned", None), (50, "learned", 50), (0, "none", None), (0, "reverse", 0)],
)
def test_settings_have_the_lookahead_that_was_chosen_or_an_automatic_one(
    lookahead_bytes: int, prefetch: str, planned: int | None
) -> None:
    assert _settings(_trace(lookahead_bytes=lookahead_bytes, prefetch=prefetch)).lookahead_bytes == planned


def test_settings_have_the_depth_of_the_trace_if_it_tells() -> None:
    assert _settings(_trace(io_depth=9)).num_turns == 9
    assert _settings(_trace()).num_turns == 4


def test_settings_that_are_given_come_before_the_trace_and_are_refused_by_name() -> None:
    found = _settings(_trace(), host_bytes="3KiB", staging_bytes="2KiB", codec="auto", device_bytes="1KiB")
    assert (found.host_bytes, found.staging_bytes, found.codec, found.device_bytes) == (3072, 2048, "auto", 1024)
    for option, value in (("host_bytes", "much"), ("codec", "zip"), ("device_bytes", "auto")):
        with pytest.raises(ConfigError) as caught:
            _settings(_trace(), **{option: value})
        assert caught.value.option == option

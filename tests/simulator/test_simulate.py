"""What must hold of any simulated step, whatever the workload, the hardware and the settings."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.made_up import chain, drive
from tierstore.errors import StoreFullError
from tierstore.simulator import (
    CodecSpeed,
    Compute,
    EndScope,
    Hardware,
    Pack,
    Release,
    Saved,
    Settings,
    SimulatedStep,
    Unpack,
    Workload,
    simulate,
)

_MIB = 2**20
_PACK_WAITS, _UNPACK_WAITS = "pack waits for budget", "unpack waits for restore"


def _even(gap: float = 0.01, cores: float = 1.0, kind: str = "") -> Workload:
    return chain([16 * _MIB] * 40, gap, cores=cores, kind=kind)


def _machine(write: float, read: float | None = None, **options: float) -> Hardware:
    return Hardware(drive(write, read), **{"cores": 4, **options})


def _drive_alone(write: float, read: float | None = None) -> Hardware:
    """Cores never slow training. A record costs some time, or tiny ones could go to and fro without any passing."""
    return _machine(write, read, cores=64, cpu_seconds_per_record=1e-4)


chains = st.lists(st.tuples(st.integers(64 * 2**10, 64 * _MIB), st.floats(1e-3, 0.1)), min_size=1, max_size=25).map(
    lambda layers: chain([nbytes for nbytes, _ in layers], [gap for _, gap in layers])
)
budgets = st.builds(
    Settings,
    host_bytes=st.integers(0, 512 * _MIB),
    staging_bytes=st.integers(64 * _MIB, 256 * _MIB),  # any tensor fits
    prefetch=st.sampled_from(["learned", "reverse", "none"]),
)
speeds = st.floats(1e7, 1e10)


def _steps(workload: Workload, hardware: Hardware, how: Settings, num_steps: int = 3) -> list[SimulatedStep]:
    return list(simulate(workload, hardware, how, num_steps=num_steps)[0])


@settings(max_examples=50, deadline=None)
@given(chains, budgets)
def test_step_infinitely_fast_drive_is_the_compute_time(workload: Workload, how: Settings) -> None:
    for step in _steps(workload, _machine(inf, cores=64), how):
        assert step.seconds == pytest.approx(workload.compute_seconds, rel=1e-9, abs=1e-12)
        assert sum(step.counters.stall_seconds.values()) == pytest.approx(0, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(chains, budgets, speeds, speeds)
def test_step_any_drive_is_compute_and_waits_and_no_faster_than_the_drive(
    workload: Workload, how: Settings, write: float, read: float
) -> None:
    steps = _steps(workload, _drive_alone(write, read), how)
    for step in steps:
        waited = sum(step.counters.stall_seconds.values())
        assert step.seconds == pytest.approx(workload.compute_seconds + waited, rel=1e-6, abs=1e-9)
    moving = sum(step.counters.read_bytes / read + step.counters.written_bytes / write for step in steps)
    assert sum(step.seconds for step in steps) >= moving * (1 - 1e-6) - 1e-9
    assert steps == _steps(workload, _drive_alone(write, read), how), "again it is the same"


def test_step_slower_drive_takes_longer_and_the_learned_plan_less_than_the_first() -> None:
    steps = [_steps(_even(), _machine(speed), Settings(256 * _MIB)) for speed in (4e9, 8e8, 2e8)]
    seconds = [each[-1].seconds for each in steps]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 2 * seconds[0]
    assert seconds[1] < 0.95 * steps[1][0].seconds


_NBYTES = 25_000 * 4096


def test_step_one_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    """Staging holds one tensor, so the second pack waits for the first write."""
    slow_to_answer = replace(drive(1e9, 1e8), write_latency_seconds=0.5, read_latency_seconds=0.25)
    actions = [Pack(0), Pack(1), Pack(2), EndScope(), Compute(10.0), Unpack(0), Release(0), Release(1), Release(2)]
    workload = Workload([Saved(_NBYTES, node) for node in range(3)], actions)
    how = Settings(0, staging_bytes=_NBYTES, prefetch="none")
    step = _steps(workload, Hardware(slow_to_answer, cores=4), how, num_steps=1)[0]
    assert step.counters.stall_seconds[_PACK_WAITS] == pytest.approx(0.5 + 0.1024)
    assert step.counters.stall_seconds[_UNPACK_WAITS] == pytest.approx(0.25 + 1.024)


def test_step_read_takes_no_turn_from_the_writes() -> None:
    """Two writes of half a second, one at a time; the first record is read while the second is being written."""
    answers_late = replace(drive(inf), write_latency_seconds=0.5, read_latency_seconds=0.25)
    actions = [Pack(0), Pack(1), EndScope(), Compute(0.6), Unpack(0), Release(0), Compute(1.0), Unpack(1), Release(1)]
    workload = Workload([Saved(2 * _MIB, 0), Saved(2 * _MIB, 1)], actions)
    step = _steps(workload, Hardware(answers_late, cores=4), Settings(0, prefetch="none", io_depth=1), num_steps=1)[0]
    assert step.seconds == pytest.approx(0.6 + 0.25 + 1.0 + 0.25)


def _codec(name: str, ratio: float, encode: float, decode: float) -> CodecSpeed:
    return CodecSpeed(data="x", codec=name, ratio=ratio, encode_bytes_per_second=encode, decode_bytes_per_second=decode)


def test_codec_halves_what_is_moved_and_a_slow_one_costs_its_time() -> None:
    good, slow = _codec("zstd:1", 0.5, 1e12, 1e12), _codec("zstd:1", 0.9, 5e7, 1e8)
    plain, halved, slowed = (
        _steps(_even(), replace(_machine(3e8), codecs={("", "zstd:1"): codec}), Settings(64 * _MIB, codec=name))[-1]
        for codec, name in ((good, "none"), (good, "zstd:1"), (slow, "zstd:1"))
    )
    assert halved.counters.written_bytes == pytest.approx(halved.counters.spilled_bytes / 2)
    assert halved.seconds < 0.65 * plain.seconds
    assert slowed.seconds > 1.5 * plain.seconds


@pytest.mark.parametrize(("speed", "is_encoded"), [(1e8, True), (1e11, False)])
def test_codec_auto_encodes_where_the_drive_is_slow(speed: float, is_encoded: bool) -> None:
    codecs = {("floats", f"zstd:{level}"): _codec(f"zstd:{level}", 0.5, 1e9, 2e9) for level in (-3, 1)}
    machine = replace(_machine(speed), codecs=codecs)
    step = _steps(_even(kind="floats"), machine, Settings(64 * _MIB, codec="auto"))[-1]
    assert (step.counters.written_bytes < 0.8 * step.counters.spilled_bytes) == is_encoded


def test_disk_too_small_for_the_step_is_full_as_the_store_would_be() -> None:
    with pytest.raises(StoreFullError) as caught:
        _steps(_even(), _machine(1e9), Settings(64 * _MIB, disk_bytes=64 * _MIB))
    assert (caught.value.disk_budget_bytes, caught.value.host_budget_bytes) == (64 * _MIB, 64 * _MIB)

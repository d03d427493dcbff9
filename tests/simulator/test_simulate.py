"""What must hold of any simulated step, whatever the workload, the hardware and the settings."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.made_up import chain, drive
from tierstore.disk.tier import Loaded
from tierstore.errors import ConfigError, StoreFullError
from tierstore.rules.observer import Observer
from tierstore.simulator import (
    CodecSpeed,
    Compute,
    DepthSpeed,
    Drive,
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
from tierstore.tracing.events import Restore, Spill

_MIB = 2**20
_TOLERANCE = 1e-9


def _even(num: int = 40, mebibytes: int = 16, gap: float = 0.01, cores: float = 1.0, kind: str = "") -> Workload:
    return chain([mebibytes * _MIB] * num, gap, cores=cores, kind=kind)


def _machine(write: float, read: float | None = None, **options: float) -> Hardware:
    return Hardware(drive(write, read), **{"cores": 4, **options})


def _drive_alone(write: float, read: float | None = None) -> Hardware:
    """Cores never slow training. A record costs some time, or tiny ones could go to and fro without any passing."""
    return _machine(write, read, cores=64, contention=0.0, cpu_seconds_per_record=1e-4)


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


class _Needed(Observer):
    """Checks that whoever is given bytes that had left memory is given them after they were read."""

    def __init__(self) -> None:
        self.on_disk: set[int] = set()
        self.num_read = 0

    def freed(self, record: int, nbytes: int) -> None:
        self.on_disk.add(record)

    def restore_ended(self, record: int, outcome: Loaded | Exception, *, is_wanted: bool) -> None:
        if is_wanted:
            self.on_disk.remove(record)
            self.num_read += 1


def _steps(workload: Workload, hardware: Hardware, how: Settings, num_steps: int = 3) -> list[SimulatedStep]:
    return list(simulate(workload, hardware, how, num_steps=num_steps)[0])


@settings(deadline=None)
@given(chains, budgets)
def test_step_infinitely_fast_drive_is_the_compute_time(workload: Workload, how: Settings) -> None:
    for step in _steps(workload, _machine(inf, cores=64), how):
        assert step.seconds == pytest.approx(workload.compute_seconds, rel=_TOLERANCE, abs=1e-12)
        assert sum(step.stall_seconds.values()) == pytest.approx(0, abs=1e-12)


@settings(deadline=None)
@given(chains, budgets, speeds, speeds)
def test_step_any_drive_is_compute_and_waits_and_no_faster_than_the_drive(
    workload: Workload, how: Settings, write: float, read: float
) -> None:
    steps = _steps(workload, _drive_alone(write, read), how)
    for step in steps:
        waited = sum(step.stall_seconds.values())
        assert step.seconds == pytest.approx(workload.compute_seconds + waited, rel=1e-6, abs=1e-9)
    moving = sum(step.counters.read_bytes / read for step in steps)
    written = sum(step.counters.written_bytes / write for step in steps)
    assert sum(step.seconds for step in steps) >= (moving + written) * (1 - 1e-6) - 1e-9


@settings(deadline=None)
@given(chains, budgets, speeds)
def test_step_any_settings_stays_within_its_budgets(workload: Workload, how: Settings, speed: float) -> None:
    largest = max(saved.nbytes for saved in workload.saved)
    for step in _steps(workload, _drive_alone(speed), how):
        assert step.host_bytes_peak <= how.host_bytes
        assert step.staging_bytes_peak <= how.staging_bytes + 2 * largest  # see `tierstore/rules/windows.py`


@settings(deadline=None)
@given(chains, budgets, speeds)
def test_restores_any_settings_come_before_what_left_memory_is_used(
    workload: Workload, how: Settings, speed: float
) -> None:
    seen = _Needed()
    steps = simulate(workload, _drive_alone(speed), how, observer=seen)[0]
    restores = [transfer for step in steps for transfer in step.transfers if isinstance(transfer, Restore)]
    spills = [transfer for step in steps for transfer in step.transfers if isinstance(transfer, Spill)]
    assert seen.num_read == sum(restore.wanted for restore in restores)
    assert sum(spill.stored_bytes for spill in spills) == sum(step.counters.written_bytes for step in steps)
    assert {restore.record for restore in restores} <= {spill.record for spill in spills}
    written_at = {spill.record: spill.end_ns for spill in spills}
    assert all(restore.queued_ns >= written_at[restore.record] for restore in restores)


@settings(deadline=None)
@given(chains, budgets, speeds)
def test_simulate_again_is_the_same(workload: Workload, how: Settings, speed: float) -> None:
    assert _steps(workload, _drive_alone(speed), how) == _steps(workload, _drive_alone(speed), how)


@settings(max_examples=40, deadline=None)
@given(chains, budgets, speeds, st.floats(1.2, 4))
def test_step_faster_drive_is_hardly_ever_slower(
    workload: Workload, how: Settings, speed: float, factor: float
) -> None:
    """Decisions are greedy, so a faster drive may take another turn; it may not cost more than a few transfers."""
    slow, fast = (_steps(workload, _drive_alone(each), how)[-1] for each in (speed, speed * factor))
    some_transfers = 4 * max(saved.nbytes for saved in workload.saved) / speed
    assert fast.seconds <= slow.seconds * 1.05 + some_transfers


def test_step_slower_drive_takes_longer() -> None:
    seconds = [_steps(_even(), _machine(speed), Settings(256 * _MIB))[-1].seconds for speed in (4e9, 1e9, 5e8, 2e8)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 2 * seconds[0]


def test_step_learned_plan_is_faster_than_the_first() -> None:
    steps = _steps(_even(), _machine(8e8), Settings(256 * _MIB))
    assert steps[-1].seconds < 0.95 * steps[0].seconds


def test_step_without_prefetch_waits_for_every_read() -> None:
    step = _steps(_even(), _machine(2e9), Settings(256 * _MIB, prefetch="none"))[-1]
    assert step.counters.prefetch_hits == step.counters.prefetch_late == 0
    read_seconds = step.counters.restored_bytes / 2e9
    assert step.stall_seconds["unpack waits for restore"] == pytest.approx(read_seconds)


def test_step_budget_for_all_moves_nothing() -> None:
    step = _steps(_even(), _machine(1e9), Settings(2**40))[-1]
    assert (step.counters.spilled_bytes, step.counters.restored_bytes, list(step.transfers)) == (0, 0, [])


def test_step_one_write_takes_latency_and_bytes_over_bandwidth() -> None:
    slow_to_answer = replace(drive(1e9, 1e8), write_latency_seconds=0.5, read_latency_seconds=0.25)
    nbytes = 25_000 * 4096
    actions = [Pack(0), EndScope(), Compute(10.0), Unpack(0), Release(0)]
    workload = Workload([Saved(nbytes, 0)], actions)
    step = _steps(workload, Hardware(slow_to_answer, cores=4), Settings(0), num_steps=1)[0]
    spill, restore = step.transfers
    assert spill.end_ns - spill.began_ns == pytest.approx((0.5 + 0.1024) * 1e9, abs=2)
    assert restore.end_ns - restore.began_ns == pytest.approx((0.25 + 1.024) * 1e9, abs=2)


def test_step_deeper_queue_uses_what_the_drive_has() -> None:
    deep = Drive([DepthSpeed(1, 2e8), DepthSpeed(4, 8e8)], [DepthSpeed(1, 2e8), DepthSpeed(4, 8e8)])
    times = [_steps(_even(), Hardware(each, cores=4), Settings(64 * _MIB))[-1].seconds for each in (deep, drive(2e8))]
    assert times[0] < 0.6 * times[1]


def test_step_deeper_queue_is_used_only_as_far_as_there_are_turns_each_way() -> None:
    deep = Drive([DepthSpeed(1, 2e8), DepthSpeed(4, 8e8)], [DepthSpeed(1, 2e8), DepthSpeed(4, 8e8)])
    each = Settings(64 * _MIB, num_spill_lanes=6, num_restore_lanes=6)
    times = [
        _steps(_even(), Hardware(deep, cores=4), replace(each, num_turns=turns))[-1].seconds for turns in (4, 2, 1)
    ]
    assert times[0] < 0.8 * times[1] < 0.8 * 0.8 * times[2]


def test_step_read_takes_no_turn_from_the_writes() -> None:
    """Two writes of half a second, one at a time; the first record is read while the second is being written."""
    answers_late = replace(drive(inf), write_latency_seconds=0.5, read_latency_seconds=0.25)
    actions = [Pack(0), Pack(1), EndScope(), Compute(0.6), Unpack(0), Release(0), Compute(1.0), Unpack(1), Release(1)]
    workload = Workload([Saved(4096, 0), Saved(4096, 1)], actions)
    step = _steps(workload, Hardware(answers_late, cores=4), Settings(0, prefetch="none", num_turns=1), num_steps=1)[0]
    spills = [transfer for transfer in step.transfers if isinstance(transfer, Spill)]
    restores = [transfer for transfer in step.transfers if isinstance(transfer, Restore)]
    assert [spill.end_ns / 1e9 for spill in spills] == pytest.approx([0.5, 1.0])
    assert restores[0].end_ns / 1e9 == pytest.approx(0.85)


def _without_waits(step: SimulatedStep) -> float:
    return step.seconds - sum(step.stall_seconds.values())


def test_step_busy_cores_are_shared_and_slow_training_by_the_contention() -> None:
    workload, how = _even(cores=4), Settings(64 * _MIB)
    taken = [
        _without_waits(_steps(workload, _machine(1e9, cpu_seconds_per_byte=2e-10, contention=contention), how)[-1])
        for contention in (0.0, 1.0, 3.0)
    ]
    assert workload.compute_seconds < taken[0] < taken[1] < taken[2]


def test_step_idle_cores_slow_training_by_the_contention_alone() -> None:
    workload, how = _even(cores=1, gap=0.1), Settings(600 * _MIB)
    free, suffering = (
        _steps(workload, _machine(1e10, cores=64, cpu_seconds_per_byte=1e-9, contention=contention), how)[-1]
        for contention in (0.0, 2.0)
    )
    assert free.counters.spilled_bytes
    assert free.seconds == pytest.approx(workload.compute_seconds)
    background_seconds = 1e-9 * (free.counters.spilled_bytes + free.counters.restored_bytes)
    assert suffering.seconds - workload.compute_seconds == pytest.approx(2.0 * background_seconds / 64, rel=0.1)


def test_step_calls_that_queue_records_cost_their_time() -> None:
    workload, how = _even(gap=0.1), Settings(64 * _MIB)
    free, paid = (
        _steps(workload, _machine(1e10, cores=64, contention=0.0, call_seconds_per_record=seconds), how)[-1]
        for seconds in (0.0, 1e-3)
    )
    num_moved = len(free.transfers)
    assert free.seconds == pytest.approx(workload.compute_seconds)
    assert num_moved
    assert paid.seconds - free.seconds == pytest.approx(num_moved * 1e-3)


def test_drive_of_one_transfer_at_a_time_ends_the_first_first() -> None:
    """Both halves of the drive's time, or all of it for the first: the second ends at the same time."""
    shared = drive(1e8)
    actions = [Pack(0), Pack(1), EndScope(), Compute(10.0), Unpack(1), Release(1), Unpack(0), Release(0)]
    workload = Workload([Saved(10_000 * 4096, 0), Saved(10_000 * 4096, 1)], actions)
    ends = [
        [transfer.end_ns / 1e9 for transfer in _steps(workload, Hardware(each, cores=4), Settings(0))[0].transfers[:2]]
        for each in (shared, replace(shared, num_at_once=1))
    ]
    assert ends == [pytest.approx([0.8192, 0.8192]), pytest.approx([0.4096, 0.8192])]


def test_ranks_share_the_drive() -> None:
    alone = simulate(_even(), _machine(1e9), Settings(64 * _MIB))
    both = simulate(_even(), _machine(1e9), Settings(64 * _MIB), num_ranks=2)
    half = simulate(_even(), _machine(5e8), Settings(64 * _MIB))
    assert len(both) == 2
    assert both[0][-1].seconds == pytest.approx(both[1][-1].seconds, rel=0.05)
    assert alone[0][-1].seconds < 0.7 * both[0][-1].seconds
    assert both[0][-1].seconds == pytest.approx(half[0][-1].seconds, rel=0.05)


def test_codec_halves_what_is_written_and_read() -> None:
    hardware = replace(_machine(3e8), codecs=[CodecSpeed("", "zstd:1", 0.5, 1e12, 1e12)])
    plain, encoded = (_steps(_even(), hardware, Settings(64 * _MIB, codec=codec))[-1] for codec in ("none", "zstd:1"))
    assert encoded.counters.written_bytes == pytest.approx(encoded.counters.spilled_bytes / 2)
    assert encoded.seconds < 0.65 * plain.seconds


def test_codec_slow_one_costs_its_time() -> None:
    hardware = replace(_machine(3e9), codecs=[CodecSpeed("", "zstd:1", 0.9, 5e7, 1e8)])
    plain, encoded = (_steps(_even(), hardware, Settings(64 * _MIB, codec=codec))[-1] for codec in ("none", "zstd:1"))
    assert encoded.seconds > 2 * plain.seconds


@pytest.mark.parametrize(("speed", "is_encoded"), [(1e8, True), (1e11, False)])
def test_codec_auto_encodes_where_the_drive_is_slow(speed: float, is_encoded: bool) -> None:
    speeds = [CodecSpeed("floats", f"zstd:{level}", 0.5, 1e9, 2e9) for level in (-3, 1)]
    step = _steps(_even(kind="floats"), replace(_machine(speed), codecs=speeds), Settings(64 * _MIB, codec="auto"))[-1]
    assert (step.counters.written_bytes < 0.8 * step.counters.spilled_bytes) == is_encoded


def test_disk_too_small_for_the_step_is_full_as_the_store_would_be() -> None:
    with pytest.raises(StoreFullError) as caught:
        _steps(_even(), _machine(1e9), Settings(64 * _MIB, disk_bytes=64 * _MIB))
    assert (caught.value.disk_budget_bytes, caught.value.host_budget_bytes) == (64 * _MIB, 64 * _MIB)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Drive([], [DepthSpeed(1, 1.0)]),
        lambda: Drive([DepthSpeed(2, 1.0), DepthSpeed(1, 1.0)], [DepthSpeed(1, 1.0)]),
        lambda: Drive([DepthSpeed(1, 0.0)], [DepthSpeed(1, 1.0)]),
        lambda: Drive([DepthSpeed(1, 1.0)], [DepthSpeed(1, 1.0)], num_at_once=0),
        lambda: _machine(1e9, contention=-1.0),
        lambda: Settings(0, prefetch="sometimes"),
        lambda: Settings(0, num_turns=0),
        lambda: Workload([Saved(1, 0)], []),
        lambda: Workload([Saved(1, 0)], [Unpack(0), Pack(0)]),
        lambda: Workload([Saved(1, 0)], [Pack(0), Release(0), Unpack(0)]),
        lambda: Workload([Saved(1, 0)], [Pack(0), Unpack(-(2**40))]),
        lambda: Workload([Saved(1, 0)], [Pack(0), Release(-1)]),
        lambda: Workload([Saved(1, 0, record=0)], [Pack(0)]),
        lambda: Workload([Saved(-1, 0)], [Pack(0)]),
        lambda: Workload([Saved(2**62, 0)], [Pack(0)]),
        lambda: simulate(_even(1), _machine(1e9), Settings(0), num_ranks=0),
    ],
)
def test_simulate_what_makes_no_sense_is_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_simulator_imported_without_torch() -> None:
    code = "import sys, tierstore.simulator.simulate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

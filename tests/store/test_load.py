"""What the choice of a codec knows of disk and cores: plain figures in, averages out."""

import os
from pathlib import Path

import pytest

from tests.cgroups import entering, made_cgroup
from tests.processes import output_of
from tierstore.base import config
from tierstore.base.config import available_cores
from tierstore.disk.codec.choice import Load
from tierstore.disk.codec.load import LoadMeter, Readings, TransferClock

MB = 10**6


def meter() -> LoadMeter:
    return LoadMeter(4.0, Readings(100.0, 50.0, 10.0))


@pytest.mark.parametrize(
    ("begins", "ends", "num_bytes", "speed"),
    [
        ([1.0] * 4, [1.1] * 4, 16 * MB, 640 * MB),  # at once: they share the time, though each of them saw 160 MB/s
        ([0.0, 10.0, 20.0, 30.0], [0.1, 10.1, 20.1, 30.1], 10 * MB, 100 * MB),  # time in which nothing runs is none
        ([0.0, 1.0, 2.0, 3.0], [0.1, 1.1, 2.1, 3.1], 0, None),  # failed transfers move no bytes
    ],
)
def test_speed_is_of_the_time_in_which_something_was_under_way(
    begins: list[float], ends: list[float], num_bytes: int, speed: float | None
) -> None:
    clock = TransferClock()
    if begins[0] == begins[-1]:
        for begin in begins:
            clock.begin("write", begin)
        found = [clock.end("write", end, num_bytes) for end in ends]
    else:
        found = []
        for begin, end in zip(begins, ends, strict=True):
            clock.begin("write", begin)
            found.append(clock.end("write", end, num_bytes))
    assert found == [None, None, None, speed and pytest.approx(speed)]


def test_writes_and_reads_at_once_share_the_disk() -> None:
    clock = TransferClock()
    for _ in range(4):
        clock.begin("write", 0.0)
        clock.begin("read", 0.0)
    writes = [clock.end("write", 1.0, 50 * MB) for _ in range(4)]
    reads = [clock.end("read", 1.0, 100 * MB) for _ in range(4)]
    assert writes[-1] == pytest.approx(400 * MB)
    assert reads[-1] == pytest.approx(800 * MB)


@pytest.mark.parametrize(
    ("num_cores", "idle_seconds", "process_seconds", "free_cores"),
    [
        (4.0, 4.0, 0.0, 4.0),  # cores that wait for the disk are free
        (4.0, 0.5, 0.0, 0.5),  # other processes make the machine busy
        (2.0, 4.0, 1.5, 0.5),  # all cores look idle, but the process may use two and uses one and a half
        (4.0, None, 3.0, 1.0),  # without idle times the process alone counts
    ],
)
def test_free_cores_are_those_that_neither_others_nor_a_quota_take(
    num_cores: float, idle_seconds: float | None, process_seconds: float, free_cores: float
) -> None:
    meter = LoadMeter(num_cores, Readings(100.0, None if idle_seconds is None else 0.0, 10.0))
    found = meter.update(Readings(101.0, idle_seconds, 10.0 + process_seconds))
    assert found == Load(demand=0.0, free_cores=pytest.approx(free_cores))


def test_the_store_itself_does_not_make_the_machine_busy() -> None:
    busy = meter()
    busy.count(cpu_seconds=2.5, disk_seconds=0.4)
    found = busy.update(Readings(101.0, 51.0, 13.0))  # 3 of 4 cores were used: 2.5 by the store, 0.5 by training
    assert found.free_cores == pytest.approx(3.5)
    assert found.demand == pytest.approx(0.4)


def test_an_unknown_disk_is_as_busy_as_can_be() -> None:
    unknown = meter()
    unknown.count(0.0, None)
    unknown.count(0.0, 0.1)
    assert unknown.update(Readings(101.0, 54.0, 10.0)).demand == 1.0
    assert unknown.update(Readings(102.0, 58.0, 10.0)).demand < 0.2  # known again


def test_the_past_fades_within_a_second_or_two() -> None:
    fading = meter()
    fading.count(0.0, 1.0)
    assert fading.update(Readings(101.0, 50.0, 10.0)) == Load(pytest.approx(1.0), pytest.approx(0.0))
    soon = fading.update(Readings(101.1, 50.4, 10.0))
    assert 0.5 < soon.demand < 1.0
    assert 0.0 < soon.free_cores < 2.0
    later = fading.update(Readings(103.1, 58.4, 10.0))
    assert later.demand < 0.05
    assert later.free_cores > 3.8


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4.0),
        ({"cpu.max": "max 100000\n"}, 4.0),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "800000 100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu.max": "nonsense\n"}, 4.0),
    ],
)
def test_available_cores_are_at_most_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], expected: float
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(config, "_CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert available_cores() == expected


def test_available_cores_in_a_nested_group_with_a_quota_are_no_more() -> None:
    """As a service's or a job's, which is no container: its group is not the root."""
    program = "from tierstore.base.config import available_cores; print(available_cores())"
    with made_cgroup("cpu", cpu__cfs_quota_us=150_000, cpu__cfs_period_us=100_000) as group:
        (group / "within").mkdir()
        try:
            for place in (group, group / "within"):
                assert float(output_of(program, before=entering(place))) == min(1.5, len(os.sched_getaffinity(0)))
        finally:
            (group / "within").rmdir()

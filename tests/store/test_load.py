"""What the choice of a codec knows of disk and cores: plain figures in, averages out."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cgroups import made_cgroup
from tierstore.base import config
from tierstore.base.config import available_cores
from tierstore.disk.codec.choice import Load
from tierstore.disk.codec.load import LoadMeter, Readings, TransferClock, read_machine

MB = 10**6


def meter(num_cores: float = 4.0) -> LoadMeter:
    return LoadMeter(num_cores, Readings(100.0, 50.0, 10.0))


def test_transfers_at_once_share_the_time_they_take() -> None:
    """Four of 16 MB in the same 0.1 s: 640 MB/s, though each of them saw 160."""
    clock = TransferClock()
    for _ in range(4):
        clock.begin("write", 1.0)
    speeds = [clock.end("write", 1.1, 16 * MB) for _ in range(4)]
    assert speeds == [None, None, None, pytest.approx(640 * MB)]


def test_time_in_which_nothing_runs_does_not_count() -> None:
    clock = TransferClock()
    speed = None
    for number in range(4):
        clock.begin("read", 10.0 * number)
        speed = clock.end("read", 10.0 * number + 0.1, 10 * MB)
    assert speed == pytest.approx(100 * MB)


def test_writes_and_reads_at_once_share_the_disk() -> None:
    clock = TransferClock()
    for _ in range(4):
        clock.begin("write", 0.0)
        clock.begin("read", 0.0)
    writes = [clock.end("write", 1.0, 50 * MB) for _ in range(4)]
    reads = [clock.end("read", 1.0, 100 * MB) for _ in range(4)]
    assert writes[-1] == pytest.approx(400 * MB)
    assert reads[-1] == pytest.approx(800 * MB)


def test_each_speed_is_of_what_ended_since_the_last() -> None:
    clock = TransferClock()
    found = []
    for number in range(8):
        clock.begin("write", float(number))
        found.append(clock.end("write", number + (0.1 if number < 4 else 0.2), 10 * MB))
    assert [speed for speed in found if speed] == [pytest.approx(100 * MB), pytest.approx(50 * MB)]


def test_failed_transfers_move_no_bytes() -> None:
    clock = TransferClock()
    for number in range(8):
        clock.begin("write", float(number))
        assert clock.end("write", number + 0.1, 0) is None


def test_cores_that_wait_for_the_disk_are_free() -> None:
    found = meter().update(Readings(101.0, 54.0, 10.0))
    assert found == Load(demand=0.0, free_cores=pytest.approx(4.0))


def test_the_store_itself_does_not_make_the_machine_busy() -> None:
    busy = meter()
    busy.count(cpu_seconds=2.5, disk_seconds=0.4)
    found = busy.update(Readings(101.0, 51.0, 13.0))  # 3 of 4 cores were used: 2.5 by the store, 0.5 by training
    assert found.free_cores == pytest.approx(3.5)
    assert found.demand == pytest.approx(0.4)


def test_other_processes_make_the_machine_busy() -> None:
    assert meter().update(Readings(101.0, 50.5, 10.0)).free_cores == pytest.approx(0.5)


def test_a_quota_below_the_cores_counts() -> None:
    """All cores look idle, but the process may use two and uses one and a half."""
    assert meter(2.0).update(Readings(101.0, 54.0, 11.5)).free_cores == pytest.approx(0.5)


def test_without_idle_times_the_process_alone_counts() -> None:
    blind = LoadMeter(4.0, Readings(100.0, None, 10.0))
    assert blind.update(Readings(101.0, None, 13.0)).free_cores == pytest.approx(1.0)


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


def test_a_thread_that_computes_takes_a_core_off_the_free_ones() -> None:
    """On the real machine: readings only ever grow, and a second of work is a second of the process."""
    ends = threading.Event()

    def work() -> None:
        started = time.thread_time()
        while time.thread_time() - started < 0.3:
            sum(range(1000))
        ends.set()

    before = read_machine()
    threading.Thread(target=work).start()
    assert ends.wait(60)
    after = read_machine()
    assert after.process - before.process >= 0.3
    assert after.wall > before.wall
    assert before.idle is not None
    assert after.idle is not None
    assert after.idle >= before.idle


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
    program = (
        "import os, sys; from pathlib import Path; from tierstore.base.config import available_cores\n"
        "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "print(available_cores())"
    )
    with made_cgroup("cpu", cpu__cfs_quota_us=150_000, cpu__cfs_period_us=100_000) as group:
        (group / "within").mkdir()
        try:
            for place in (group, group / "within"):
                command = [sys.executable, "-c", program, str(place)]
                ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
                assert float(ended.stdout) == min(1.5, len(os.sched_getaffinity(0)))
        finally:
            (group / "within").rmdir()

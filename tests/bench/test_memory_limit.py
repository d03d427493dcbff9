"""What the benchmarks about memory stand on: cgroups that limit, a mover that moves."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import memory_limit
from bench.cgroup import CgroupError, MemoryCgroup, drive_limits, find_cgroup, memory_cgroup, slow_drive
from bench.trainings import Training

HYBRID = "5:memory:/jobs/one\n6:blkio:/a\n3:cpuset,cpu:/\n0::/\n"
HYBRID_MOUNTS = (
    "31 20 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "34 31 0:31 / /sys/fs/cgroup/blkio rw,relatime - cgroup cgroup rw,blkio\n"
    "36 31 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
)
MIB = 2**20


UNIFIED_MOUNTS = "24 20 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("controller", "groups", "mounts", "own", "above", "version"),
    [
        ("memory", HYBRID, HYBRID_MOUNTS, "memory/jobs/one", "memory/jobs/one", 1),
        ("blkio", HYBRID, HYBRID_MOUNTS, "blkio/a", "blkio/a", 1),
        ("memory", "0::/user.slice/shell\n", UNIFIED_MOUNTS, "user.slice/shell", "user.slice", 2),
        ("memory", "0::/\n", UNIFIED_MOUNTS, "", "", 2),
    ],
)
def test_find_each_version(controller: str, groups: str, mounts: str, own: str, above: str, version: int) -> None:
    root = Path("/sys/fs/cgroup")
    place = find_cgroup(controller, groups, mounts)
    assert place == (root / controller if version == 1 else root, root / own, version)
    assert place.above == root / above
    with pytest.raises(CgroupError, match="no cgroup hierarchy"):
        find_cgroup("memory", "5:memory:/\n", "20 1 8:1 / / rw - ext4 /dev/sda rw\n")


def test_drive_limits_are_for_reads_and_writes() -> None:
    first = {f"blkio.throttle.{way}_bps_device": "254:0 1000" for way in ("read", "write")}
    assert drive_limits("254:0", 1000, 1) == first
    assert drive_limits("254:0", 1000, 2) == {"io.max": "254:0 rbps=1000 wbps=1000"}


def test_slow_drive_moves_the_process_and_moves_it_back(tmp_path: Path) -> None:
    before = Path("/proc/self/cgroup").read_text()
    try:
        with slow_drive(tmp_path, 10**9):
            assert "tierstore-bench-" in Path("/proc/self/cgroup").read_text()
            raise KeyboardInterrupt
    except CgroupError as error:
        pytest.skip(str(error))
    except KeyboardInterrupt:
        pass
    assert Path("/proc/self/cgroup").read_text() == before


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    """A real one."""
    try:
        with memory_cgroup() as made:
            yield made
    except CgroupError as error:
        pytest.skip(str(error))


def allocate(cgroup: MemoryCgroup, num_bytes: int) -> int:
    """Exit code of a process inside that touches so much memory."""
    return subprocess.run(cgroup.command([sys.executable, "-c", f"b'x' * {num_bytes}"]), check=False).returncode


def test_cgroup_the_peak_is_seen_and_beyond_its_limit_the_process_is_killed_and_counted(cgroup: MemoryCgroup) -> None:
    cgroup.limit(128 * MIB)
    assert allocate(cgroup, 48 * MIB) == 0
    assert 48 * MIB < cgroup.peak_bytes <= 128 * MIB
    assert cgroup.num_oom_kills == 0
    assert allocate(cgroup, 256 * MIB) == -9
    assert cgroup.num_oom_kills == 1
    assert cgroup.peak_bytes <= 128 * MIB


def started(cgroup: MemoryCgroup, each_step: str) -> Training:
    """A process inside that does so for every line that it is sent, the number of the line in `n`."""
    program = f"import sys, json\nfor n, _ in enumerate(sys.stdin):\n  {each_step}"
    command = cgroup.command([sys.executable, "-c", program])
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return Training("toy", process, cgroup)


@contextmanager
def ended(training: Training) -> Iterator[Training]:
    with training._process:
        yield training


def test_training_takes_a_step_when_told_and_gives_its_medians(cgroup: MemoryCgroup) -> None:
    step = "print(json.dumps({'step_seconds': [3, 1, 2][n], 'last_loss': n}), flush=True)"
    with ended(started(cgroup, step)) as training:
        steps = [training.step() for _ in range(3)]
        assert [each["step_seconds"] for each in steps] == [3, 1, 2]
        figures = training.figures(steps)
    assert (figures["step_seconds"], figures["last_loss"], figures["out_of_memory_kills"]) == (2, 2, 0)
    assert figures["peak_memory_bytes"] > MIB


def test_training_killed_between_two_steps_has_the_figures_of_the_first(cgroup: MemoryCgroup) -> None:
    cgroup.limit(64 * MIB)
    step = "print(json.dumps({'step_seconds': 1.0, 'last_loss': 2.0 if not n * b'x' * 2**27 else 0}), flush=True)"
    with ended(started(cgroup, step)) as training:
        figures = training.figures([training.step(), training.step()])
    assert (figures["step_seconds"], figures["last_loss"], figures["out_of_memory_kills"]) == (1.0, 2.0, 1)


def test_training_that_the_kernel_ends_has_no_figures_but_the_kill(cgroup: MemoryCgroup) -> None:
    cgroup.limit(64 * MIB)
    with ended(started(cgroup, f"b'x' * {256 * MIB}")) as training:
        assert [training.step(), training.step()] == [{}, {}]
        assert not training.is_running
        assert set(training.figures([{}])) == {"peak_memory_bytes", "out_of_memory_kills"}
        assert training.figures([{}])["out_of_memory_kills"] == 1


def test_training_that_fails_in_any_other_way_raises(cgroup: MemoryCgroup) -> None:
    with ended(started(cgroup, "sys.exit(3)")) as training, pytest.raises(RuntimeError, match="exit code 3"):
        training.step()


def test_mover_moves_what_it_was_told_to(tmp_path: Path) -> None:
    def moved() -> tuple[int, int]:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["wchar"]), int(counts["rchar"])

    wanted = 3 * memory_limit.BLOCK_BYTES, 2 * memory_limit.BLOCK_BYTES
    with memory_limit.with_mover(tmp_path, *wanted) as run:
        before = moved()
        for _ in range(2):
            with run.forward():
                pass
            run.between()
            run.after()
        after = moved()
    for first, last, each in zip(before, after, wanted, strict=True):
        assert 2 * each <= last - first < 2 * each + MIB

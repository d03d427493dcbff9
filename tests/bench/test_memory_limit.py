"""What the benchmarks about memory stand on: cgroups that limit, a mover that moves."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench import memory_limit
from bench.cgroup import CgroupError, MemoryCgroup, memory_cgroup

MIB = 2**20


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    """A real one."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(memory_cgroup())
        except CgroupError as error:
            pytest.skip(str(error))
        yield made


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


def test_ratio_is_that_of_the_turns_in_which_both_took_a_step() -> None:
    one, two, killed = {"step_seconds": 1.0}, {"step_seconds": 2.0}, {}
    turns = [{"a": two, "b": one, "c, limited": killed}, {"a": killed, "b": one, "c, limited": killed}]
    assert memory_limit.ratios("a", ["b", "c, limited"], turns) == {"step_to_b": 2}

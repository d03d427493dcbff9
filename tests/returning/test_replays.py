"""The caching allocator under allocations that were recorded in trainings: what it holds and what it takes.

The traces are of the trainings of `bench/freed_memory.py` with a store: blocks of 256 KiB and more, in three steps."""

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cgroups import entering, made_cgroup
from tests.returning.compiling import SANITIZED, compiled

HERE = Path(__file__).parent
TRACES = {path.stem: gzip.decompress(path.read_bytes()) for path in sorted((HERE / "traces").glob("*.gz"))}
MIB = 2**20
WINDOW_MIB = 32


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("plain"), "replay", "-O2")


@pytest.fixture(scope="module")
def sanitized_replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("sanitized"), "replay", *SANITIZED)


def replayed(program: Path, name: str, *arguments: object, cgroup: Path | None = None) -> list[dict[str, Any]]:
    command = [program, *map(str, arguments)]
    if cgroup is not None:
        command = [*entering(cgroup), *command, cgroup]
    done = subprocess.run(command, input=TRACES[name], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    return [json.loads(line) for line in done.stdout.splitlines()]


def most_living(name: str) -> int:
    """Bytes of all blocks that live at once."""
    sizes: list[int] = []
    living = most = 0
    for line in TRACES[name].splitlines():
        kind, _, number = line.partition(b" ")
        if kind == b"a":
            sizes.append(int(number))
            living += int(number)
            most = max(most, living)
        elif kind == b"f":
            living -= sizes[int(number)]
    return most


@pytest.mark.parametrize("name", TRACES)
def test_holds_little_more_than_what_lives_and_takes_fresh_pages_in_the_first_steps_alone(
    replay: Path, name: str
) -> None:
    first, second, third = replayed(replay, name)
    assert max(step["resident"] for step in (first, second, third)) <= most_living(name) + 8 * MIB
    assert first["fresh"] <= first["resident"]
    assert second["fresh"] <= 10 * MIB
    assert (third["fresh"], third["returned"]) == (0, 0)
    assert third["faults"] <= 100


@pytest.mark.parametrize("name", TRACES)
def test_lives_within_15_mib_beyond_its_blocks_and_a_window(replay: Path, name: str) -> None:
    limit = most_living(name) + (WINDOW_MIB + 15) * MIB
    with made_cgroup("memory", memory__limit_in_bytes=limit) as cgroup:
        *_, third = replayed(replay, name, WINDOW_MIB, cgroup=cgroup)
    assert third["faults"] <= 6000, "half a page fault for each 16 KiB would be a hundred thousand"
    assert third["resident"] <= most_living(name) + 8 * MIB


@pytest.mark.parametrize("name", TRACES)
def test_touches_no_memory_but_its_own(sanitized_replay: Path, name: str) -> None:
    replayed(sanitized_replay, name)

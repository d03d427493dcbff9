"""A training that fragments glibc's heap, with and without a limit that the kernel enforces. The caching allocator is
turned off: with it the training fits into the limit as it is."""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.cgroups import entering, made_cgroup

ROOT = Path(__file__).parents[2]
MIB = 2**20
LIMIT_BYTES = 450 * MIB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library here is not glibc"),
]


def start(
    arguments: tuple[str, ...], cgroup: Path | None = None, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    clean["TIERSTORE_ALLOCATOR"] = "0"
    command = [sys.executable, str(ROOT / "tests/returning/fragmenting.py"), *arguments]
    if cgroup is not None:
        command = [*entering(cgroup), *command]
    return subprocess.run(command, env=clean | variables, capture_output=True, text=True, check=False)


def train(*arguments: str, cgroup: Path | None = None, **variables: str) -> dict[str, Any]:
    result = start(arguments, cgroup, variables)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_training_killed_without_returning_goes_on_with_auto_and_gradients_are_the_same(store_directory: Path) -> None:
    free = train(str(store_directory), "never")
    with made_cgroup("memory", memory__limit_in_bytes=LIMIT_BYTES) as cgroup:
        killed = start((str(store_directory), "never"), cgroup)
        assert killed.returncode == -signal.SIGKILL, "it fits the limit anyway: nothing is tested"
        survived = train(str(store_directory), "auto", cgroup=cgroup)
    assert survived["gradients"] == free["gradients"]
    assert survived["returned_bytes"] > 100 * MIB
    assert survived["told"] == []  # memory was returned: there is nothing to complain of
    assert free["peak_bytes"] > 1.2 * LIMIT_BYTES


@pytest.mark.parametrize(
    ("mode", "variables"),
    [("auto", {"MALLOC_ARENA_MAX": "4"}), ("always", {"MALLOC_MMAP_THRESHOLD_": "33554432"})],
    ids=["number of arenas", "threshold"],
)
def test_training_within_a_limit_goes_on_whatever_the_launcher_has_set(
    store_directory: Path, mode: str, variables: dict[str, str]
) -> None:
    with made_cgroup("memory", memory__limit_in_bytes=LIMIT_BYTES) as cgroup:
        survived = train(str(store_directory), mode, cgroup=cgroup, **variables)
    assert survived["returned_bytes"] > 100 * MIB
    assert survived["memory_return"] == mode


def test_always_keeps_the_peak_low_without_any_limit_and_gradients_are_the_same(store_directory: Path) -> None:
    never, always = (train(str(store_directory), mode) for mode in ("never", "always"))
    assert never["gradients"] == always["gradients"]
    assert always["peak_bytes"] < never["peak_bytes"] - 200 * MIB
    assert always["returned_bytes"] > 100 * MIB
    assert always["return_seconds"] > 0
    assert (never["memory_return"], always["memory_return"]) == ("never", "always")
    assert (never["returned_bytes"], never["return_seconds"], never["told"]) == (0, 0.0, [])

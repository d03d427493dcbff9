"""The caching allocator beneath PyTorch: random use of it by threads, and what it promises to a whole process."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.returning.compiling import SANITIZED, compiled
from tierstore.returning import caching


@pytest.mark.parametrize("flags", [(), ("-DBEFORE_LINUX_5_7",)], ids=["that moves pages", "before 5.7"])
def test_blocks_of_threads_that_fork_and_change_modes_are_their_own(tmp_path: Path, flags: tuple[str, ...]) -> None:
    program = compiled(tmp_path, "stress", *SANITIZED, *flags)
    files = {"memory.max": 2**30, "memory.current": 2**30 - 40 * 2**20}  # room is short: idle chunks are freed lazily
    for name, number in files.items():
        (tmp_path / name).write_text(str(number))
    done = subprocess.run([program, "25", "3", tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert figures["used"] == 0
    assert (figures["moved"] > 0) == (not flags)


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("preloaded"), "preloaded", "-O1", "-D_GNU_SOURCE", "-fno-builtin")


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("alignments are checked and kept", 0),
        ("other calls take blocks of the cache", 0),
        ("fork handlers may allocate", 0),
        ("cancelled threads leave nothing locked", 0),
        ("small stacks are large enough", 0),
        ("locked memory is not taken in advance", 0),
        ("two frees of a block end the process", -6),
    ],
)
def test_whole_process_has_what_the_c_library_promises(preloaded: Path, what: str, code: int) -> None:
    library = caching.preload_library()
    if library is None:
        pytest.skip("the caching allocator is not there")
    env = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run([preloaded, what], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")

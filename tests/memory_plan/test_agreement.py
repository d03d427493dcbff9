"""Ranks whose blocks exchange data take one decision."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ranks_whose_blocks_communicate_do_the_same(store_directory: Path) -> None:
    """One has room for everything. If it kept what the other computes again, that one would wait for it for ever."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.memory_plan.communicating", str(store_directory)],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1"} | os.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["the same in both: True, same bits: True", "needed: False, then True"]

"""Plans of models whose blocks exchange data with other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 120
pytestmark = pytest.mark.timeout(SECONDS + 10)  # three processes import torch, and plan three times


def printed_by(program: str, directory: Path) -> list[str]:
    """The lines of a program beside this file."""
    ended = subprocess.run(
        [sys.executable, "-m", f"tests.memory_plan.{program}", str(directory)],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1"} | os.environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_each_action_around_sharded_blocks_has_the_same_bits(store_directory: Path) -> None:
    assert printed_by("sharded", store_directory) == [
        "keep: same bits, 0 handles",
        "store: same bits, 0 handles",
        "recompute: same bits, 0 handles",
        "recompute, stored: same bits, 0 handles",
        "stored: True",
        "planned as blocks that communicate: True",
        "not computed again: []",
    ]


def test_ranks_whose_blocks_communicate_do_the_same(store_directory: Path) -> None:
    """One has room for everything. If it kept what the other computes again, that one would wait for it for ever."""
    assert printed_by("communicating", store_directory) == [
        "the same in both: True, same bits: True",
        "needed: False, then True",
        "refused where they have other blocks: True, True",
    ]

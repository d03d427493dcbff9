"""Actions around blocks that FSDP2 shards, and a plan for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAME_BITS = [
    "keep: same bits, 0 handles",
    "store: same bits, 0 handles",
    "recompute: same bits, 0 handles",
    "recompute, stored: same bits, 0 handles",
    "stored: True",
]


def printed_by(program: str, *arguments: object) -> list[str]:
    """The lines of a program beside this file."""
    ended = subprocess.run(
        [sys.executable, "-m", f"tests.memory_plan.{program}", *map(str, arguments)],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1"} | os.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_each_action_around_sharded_blocks_has_the_same_bits(store_directory: Path) -> None:
    assert printed_by("sharded", store_directory) == [
        *SAME_BITS,
        "saved by each block: 57344 bytes",
        "not computed again: []",
    ]


def test_blocks_that_exchange_data_between_ranks_are_refused(store_directory: Path) -> None:
    """If one rank computed such a block again and another did not, the first would wait for ever."""
    told = printed_by("sharded", store_directory, "refused")
    assert told == ["refused: True", "refused: True"]

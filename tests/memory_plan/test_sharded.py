"""Plans of models whose blocks exchange data with other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAME_BITS = [
    "keep: same bits, 0 handles",
    "store: same bits, 0 handles",
    "recompute: same bits, 0 handles",
    "recompute, stored: same bits, 0 handles",
    "stored: True",
    "planned as blocks that communicate: True",
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


@pytest.mark.slow
def test_ranks_whose_blocks_communicate_do_the_same(store_directory: Path) -> None:
    """One has room for everything. If it kept what the other computes again, that one would wait for it for ever."""
    assert printed_by("communicating", store_directory, "limits") == [
        "the same in both: True, same bits: True",
        "needed: False, then True",
        "not computed again: []",
    ]


def test_other_blocks_in_a_rank_are_refused_and_what_differs_in_one_is_computed_again_in_none(
    store_directory: Path,
) -> None:
    """If the others did, they would wait for it for ever, while they plan already."""
    differs = "a second call gave other bits"
    assert printed_by("communicating", store_directory, "blocks") == [
        "refused where they have other blocks: True, True",
        f"not computed again: [{ {'0': '', '1': f'in another rank, {differs}', '2': ''} }, "
        f"{ {'0': '', '1': differs, '2': ''} }]",
    ]

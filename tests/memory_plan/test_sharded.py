"""Actions around blocks that FSDP2 shards, and a plan for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import python

PRINTED = """\
refused: True
refused: True
keep: same bits, 0 handles
store: same bits, 0 handles
recompute: same bits, 0 handles
recompute, store inputs: same bits, 0 handles
stored: True
calls of the model in a step: 2
saved by each block: 114688 bytes
not computed again: []
"""


@pytest.mark.slow  # two ranks that plan
def test_sharded_blocks_have_the_same_bits_and_are_not_planned_where_ranks_exchange_data(store_directory: Path) -> None:
    """If one rank computed such a block again and another did not, the first would wait for ever."""
    assert printed_by(store_directory) == PRINTED


def printed_by(store_directory: Path, *arguments: str) -> str:
    ended = python("-m", "tests.memory_plan.sharded", store_directory, *arguments, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout

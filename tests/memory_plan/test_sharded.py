"""Plans of a model that FSDP2 shards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_action_around_sharded_blocks_has_the_same_bits(store_directory: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.memory_plan.sharded", str(store_directory)],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1"} | os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "keep: same bits, 0 handles",
        "store: same bits, 0 handles",
        "recompute: same bits, 0 handles",
        "recompute, stored: same bits, 0 handles",
        "stored: True",
    ]

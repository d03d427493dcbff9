"""Two ranks under torchrun, over gloo, each with its own store under one path: DDP and FSDP2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.census import Census
from tests.hooks.distributed_training import BATCH_BYTES, NUM_STEPS, VARIANTS

NUM_RANKS = 2
LIMIT_SECONDS = 90
ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_SECONDS + 20)]


def _run(play: str, directory: Path) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, what each rank reports, and what they printed."""
    (directory / "drive").mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    worker = ["-m", "tests.hooks.distributed_worker", play, str(directory / "drive"), str(directory)]
    launched = subprocess.Popen(
        [sys.executable, *command, *worker],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = launched.communicate(timeout=LIMIT_SECONDS)
    finally:
        if launched.poll() is None:
            os.killpg(launched.pid, signal.SIGKILL)
    reports = [directory / f"rank-{rank}.json" for rank in range(NUM_RANKS)]
    assert all(report.exists() for report in reports), output
    assert os.listdir(directory / "drive") == [], "files were left behind"
    return launched.returncode, [json.loads(report.read_text()) for report in reports], output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks report of all variants, which share one launch: starting torch takes longer than training."""
    code, reports, output = _run("train", tmp_path_factory.mktemp("ranks"))
    assert code == 0, output
    return reports


@pytest.mark.parametrize("name", VARIANTS)
def test_training_on_two_ranks_same_bits(trained: list[dict[str, Any]], name: str, census: Census) -> None:
    for report in trained:
        found = report["variants"][name]
        assert found["differing"] == []
        assert found["num_gradients"] > 0
        assert found["spilled_bytes"] > 0
        assert found["restored_bytes"] > 0
        assert found["left"] == [0, 0, 0]
    census.count("distributed", f"{name.split(',')[0]}: bitwise the same on {NUM_RANKS} ranks")


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if not variant.offloads_blocks])
def test_parameters_are_never_stored(trained: list[dict[str, Any]], name: str) -> None:
    """Not the unsharded ones either, whose memory FSDP frees and fills again under the graph."""
    variant = VARIANTS[name]
    batches_bytes = NUM_STEPS * variant.num_micro_batches * BATCH_BYTES
    for report in trained:
        found = report["variants"][name]
        seen = found["observed"]
        assert seen["parameter_bytes"] > 0
        assert found["kept_bytes"]["parameter"] == seen["parameter_bytes"]
        assert found["packed_bytes"] == seen["other_bytes"]
        held_bytes = found["kept_bytes"]["alive elsewhere"]  # the loop holds its batch, of which FSDP may save a copy
        assert held_bytes in (0, batches_bytes)
        assert found["spilled_bytes"] == found["packed_bytes"] - held_bytes
    if variant.frees_parameters and not variant.is_checkpointed:
        assert all(report["variants"][name]["observed"]["num_freed"] > 0 for report in trained)


def test_rank_that_closes_its_store_early_disturbs_nobody(trained: list[dict[str, Any]]) -> None:
    for report in trained:
        closed = report["closed early"]
        assert closed["differing"] == []
        assert closed["graph"] == ("StoreClosedError" if closed["closes"] else "bitwise the same")


def test_default_budgets_of_the_ranks_share_what_is_free(trained: list[dict[str, Any]]) -> None:
    budgets = [report["budgets"] for report in trained]
    assert sum(budget["disk_bytes"] for budget in budgets) <= min(budget["free_bytes"] for budget in budgets)
    assert sum(budget["host_bytes"] for budget in budgets) <= min(budget["available_bytes"] for budget in budgets) / 3


@pytest.mark.parametrize("play", ["ddp, raises", "ddp, killed", "fsdp, killed"])
def test_rank_that_is_lost_leaves_nothing_and_the_other_goes_on(tmp_path: Path, play: str, census: Census) -> None:
    code, (survivor, lost), output = _run(play, tmp_path)
    assert code != 0, "torchrun reports the rank that was lost"
    assert lost["live_handles"] > 0
    assert lost["disk_bytes"] > 0
    assert survivor["peer is over"], output
    assert survivor["error"], "the survivor's collective ended with an error"
    assert survivor["graph"] == "bitwise the same"
    assert survivor["differing"] == []
    assert survivor["spilled_bytes"] > 0
    assert survivor["held by others"] == []
    assert survivor["files"][1] == 0
    assert survivor["names"] == []
    census.count("distributed", "lost rank: the other goes on")

"""Distributed training under the store: DDP and FSDP2 over gloo, two ranks that share one path.

What the ranks do is in `distributed_worker.py`, what they train in `distributed_variants.py`; here torchrun starts
them, and what they report is judged. An import of torch takes seconds, so all variants of training share one launch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.census import Census
from tests.hooks.distributed_variants import BATCH_BYTES, NUM_STEPS, VARIANTS

ROOT = Path(__file__).parents[2]
SUITE = "distributed training"

Report = dict[str, Any]


class Launch(NamedTuple):
    returncode: int
    out: str
    err: str
    reports: list[Report]


def launch(arguments: list[str], directory: Path, out: Path) -> Launch:
    """Two ranks, started by torchrun, that find a free port by themselves; none of them outlives the call."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with (
        (out / "out").open("w+") as stdout,
        (out / "err").open("w+") as stderr,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        ) as torchrun,
    ):
        try:
            torchrun.wait()
        finally:
            _kill(torchrun)
        stdout.seek(0)
        stderr.seek(0)
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("rank-*.json"))]
        found = Launch(torchrun.returncode, stdout.read(), stderr.read(), reports)
    assert list(directory.iterdir()) == [], "files were left behind"
    return found


def _kill(torchrun: subprocess.Popen[bytes]) -> None:
    """Torchrun and its ranks, which are in sessions of their own: no signal to its group would reach them."""
    if torchrun.poll() is None:
        for process in psutil.Process(torchrun.pid).children(recursive=True):
            process.kill()
        torchrun.kill()


def play(name: str, directory: Path, out: Path) -> Launch:
    return launch(["-m", "tests.hooks.distributed_worker", name, str(directory), str(out)], directory, out)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    found = play("train", tmp_path_factory.mktemp("drive"), tmp_path_factory.mktemp("out"))
    assert found.returncode == 0, found.err
    return found.reports


@pytest.mark.parametrize("name", VARIANTS)
def test_training_offloaded_gradients_and_parameters_bitwise_the_same(
    trained: list[Report], name: str, census: Census
) -> None:
    assert len(trained) == 2
    for rank in trained:
        report = rank["variants"][name]
        assert report["differing"] == []
        assert report["num_tensors"] > NUM_STEPS * 30
        assert report["restored_bytes"] == report["spilled_bytes"] > 0
        assert report["left"] == [0, 0, 0]
        census.count(SUITE, "tensors bitwise the same as without offloading", report["num_tensors"])
    census.count(SUITE, "variants, each on two ranks")


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if not variant.offloads_blocks])
def test_parameters_whole_or_gathered_never_stored(trained: list[Report], name: str) -> None:
    """To the byte what plain hooks saw: parameters are kept, all else is stored but for the batch.

    An alias of a parameter looks like anything else at first; it is never taken, because others hold its memory.
    """
    variant = VARIANTS[name]
    for rank in trained:
        report = rank["variants"][name]
        observed, kept = report["observed"], dict(report["kept_bytes"])
        assert kept.pop("parameter") == observed["parameter_bytes"] > 0
        assert report["packed_bytes"] == observed["other_bytes"] + observed["alias_bytes"]
        batches_bytes = BATCH_BYTES * NUM_STEPS * variant.num_micro_batches if variant.saves_batch else 0
        assert kept.pop("alive elsewhere") == observed["alias_bytes"] + batches_bytes
        spilled_bytes, packed_bytes = report["spilled_bytes"], observed["other_bytes"] - batches_bytes
        assert 0 <= spilled_bytes - packed_bytes <= observed["other_padding_bytes"], "in groups there is padding"
        assert (observed["alias_bytes"] > 0) != variant.is_checkpointed
        assert set(kept.values()) == {0}
        assert (observed["num_freed"] > 0) == variant.frees_parameters  # by FSDP, between forward and backward


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith("ddp")])
def test_ranks_with_different_batches_train_one_model(trained: list[Report], name: str) -> None:
    """The ranks did work together: without that, all else here would show little."""
    first, second = (rank["variants"][name]["parameters"] for rank in trained)
    assert first == second


def test_rank_that_closes_its_store_early_both_train_on(trained: list[Report]) -> None:
    first, second = (rank["closed early"] for rank in trained)
    assert first == {"differing": [], "graph": "bitwise the same", "closes": False}
    assert second == {"differing": [], "graph": "StoreClosedError", "closes": True}


def test_default_budgets_of_all_ranks_together_within_what_is_free(trained: list[Report]) -> None:
    """80 % of the disk and a quarter of the memory are promised; other processes change what is free meanwhile."""
    budgets = [rank["budgets"] for rank in trained]
    for promised, available, share in (("disk_bytes", "free_bytes", 0.95), ("host_bytes", "available_bytes", 0.4)):
        assert 0 < sum(one[promised] for one in budgets) <= share * min(one[available] for one in budgets)


@pytest.mark.parametrize("name", ["ddp, raises", "fsdp, killed", pytest.param("ddp, killed", marks=pytest.mark.slow)])
def test_rank_that_ends_in_a_step_store_of_the_other_works_on(
    store_directory: Path, tmp_path: Path, census: Census, name: str
) -> None:
    found = play(name, store_directory, tmp_path)
    assert found.returncode == 1, found.err
    assert len(found.reports) == 2, found.err
    survivor, other = found.reports
    assert other["disk_bytes"] > 0
    assert other["live_handles"] > 20
    assert other["files"] > 0
    assert "gloo" in survivor["error"]
    assert survivor["peer is over"]
    assert survivor["graph on disk"] > 0
    assert survivor["graph"] == "bitwise the same"
    assert survivor["differing"] == []
    assert survivor["spilled_bytes"] > 0
    assert survivor["live_handles"] == 0
    assert survivor["num_holders"] == 2  # while both lived
    assert survivor["held by others"] == []
    assert survivor["files"][0] > survivor["files"][1] == 0
    assert survivor["names"] == []
    assert ("this rank is meant to fail" in found.err) == name.endswith("raises")
    census.count(SUITE, "ranks lost")


@pytest.mark.slow
def test_example_runs(store_directory: Path, tmp_path: Path) -> None:
    found = launch([str(ROOT / "examples" / "distributed.py"), str(store_directory)], store_directory, tmp_path)
    assert found.returncode == 0, found.err
    assert "rank 0" in found.out
    assert "rank 1" in found.out

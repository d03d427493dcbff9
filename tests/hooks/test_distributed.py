"""Distributed training under the store: DDP and FSDP2 over gloo, two ranks that share one path.

What the ranks do is in `distributed_worker.py`; here torchrun starts them, and what they report is judged. An import of
torch takes seconds, so all variants share one launch.
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
from tests.hooks.distributed_worker import NUM_STEPS, VARIANTS

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


def test_training_offloaded_gradients_and_parameters_bitwise_the_same(
    store_directory: Path, tmp_path: Path, census: Census
) -> None:
    """Parameters stay, whole or gathered, and what is saved through an alias of one is never taken."""
    worker = ["-m", "tests.hooks.distributed_worker", str(store_directory), str(tmp_path)]
    found = launch(worker, store_directory, tmp_path)
    assert found.returncode == 0, found.err
    assert len(found.reports) == 2
    for name, variant in VARIANTS.items():
        for report in (rank[name] for rank in found.reports):
            assert report["differing"] == [], name
            assert report["num_tensors"] > NUM_STEPS * 30
            assert report["restored_bytes"] == report["spilled_bytes"] > 0
            assert report["left"] == [0, 0, 0]
            # Besides parameters: aliases of them, and batches.
            assert set(report["kept"]) <= {"parameter", "alive elsewhere"}
            assert "parameter" in report["kept"]
            assert variant.is_checkpointed or "alive elsewhere" in report["kept"]
            census.count(SUITE, "tensors bitwise the same as without offloading", report["num_tensors"])
        if name.startswith("ddp"):
            assert len({rank[name]["parameters"] for rank in found.reports}) == 1, "the ranks did not work together"
        census.count(SUITE, "variants, each on two ranks")


@pytest.mark.slow
def test_example_runs(store_directory: Path, tmp_path: Path) -> None:
    found = launch([str(ROOT / "examples" / "distributed.py"), str(store_directory)], store_directory, tmp_path)
    assert found.returncode == 0, found.err
    assert "rank 0" in found.out
    assert "rank 1" in found.out

"""A distributed program as a trial: its ranks end before the same step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.daemon.conftest import environment_of_tests
from tierstore.tuning.program import Program
from tierstore.tuning.recording import read_recording

TRAINING = """
import sys, torch, torch.distributed as distributed
from torch.nn.parallel import DistributedDataParallel
from tierstore import TierStore, tiered_offload
torch.set_num_threads(1)
distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)))
try:
    with TierStore(sys.argv[1], host_bytes=0, disk_bytes="1GiB") as store:
        for step in range(1000):
            with tiered_offload(store, min_bytes=0):
                loss = model(torch.randn(64, 64)).sum()
            loss.backward()
            print(f"rank {distributed.get_rank()} step {step};", flush=True)
finally:
    distributed.destroy_process_group()  # else gloo's threads may abort the process as it exits
"""


@pytest.mark.slow
def test_ranks_end_before_the_same_step_and_are_counted(
    tmp_path: Path, store_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of_tests().items():
        monkeypatch.setenv(name, value)
    script, folder = tmp_path / "train.py", tmp_path / "trial"
    script.write_text(TRAINING)
    folder.mkdir()
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    Program((sys.executable, *launcher, str(script), str(store_directory)), 4, 100.0).run(None, folder)
    said = (folder / "said").read_text()
    for rank in (0, 1):
        assert f"rank {rank} step 4;" in said
        assert f"rank {rank} step 5;" not in said
    assert read_recording(folder).num_ranks == 2

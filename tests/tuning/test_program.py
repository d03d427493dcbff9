"""Programs as trials: real processes, which end in bounded time with all that they started."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.daemon.conftest import environment_of_tests
from tierstore.errors import ConfigError
from tierstore.store.trial import VARIABLE
from tierstore.tuning.program import Program, TrialFailedError
from tierstore.tuning.recording import read_recording

_NEVER = 1000.0


@pytest.fixture(autouse=True)
def trace_of_a_scope(tmp_path: Path) -> None:
    """As if each program had entered one: what comes of it is told by `test_command.py`."""
    (tmp_path / "1-1.jsonl").touch()


def _shell(script: str, seconds: float = 60.0) -> Program:
    return Program(("sh", "-c", script), num_graphs=3, trial_seconds=seconds)


def test_program_gets_the_plan_in_its_environment(tmp_path: Path) -> None:
    _shell(f'cat "${VARIABLE}"').run(None, tmp_path)
    assert (tmp_path / "said").read_text() == (tmp_path / "plan").read_text()
    assert '"num_graphs":3' in (tmp_path / "plan").read_text()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo alas >&2; exit 3", r"ended with exit code 3; it wrote:\nalas"),
        ("kill -9 $$", r"SIGKILL \(out of memory"),
    ],
)
def test_program_that_fails_is_told_with_its_last_words_or_its_signal(script: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(TrialFailedError, match=words):
        _shell(script).run(None, tmp_path)


def test_program_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="COMMAND"):
        Program(("/no/such/program",), 3, 1.0).run(None, tmp_path)


def _pids(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()]


def _ends(pid: int) -> bool:
    """Whether it has ended, or does so soon: of those that are not our children, nobody tells us."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)


_WITH_CHILD = "trap '' TERM; sleep {seconds} & echo $$ $! > {file}; wait; sleep {seconds}"
"""Ignores SIGTERM, as its child does."""
_LEFT_BEHIND = "sleep {seconds} & echo $! > {file}"


def test_program_that_hangs_is_ended_with_its_children_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.tuning.program._END_SECONDS", 0.2)
    file = tmp_path / "pids"
    for script, num_processes in ((_WITH_CHILD, 2), (_LEFT_BEHIND, 1)):
        _shell(script.format(seconds=_NEVER, file=file), seconds=1.0).run(None, tmp_path)
        assert len(_pids(file)) == num_processes
        assert all(map(_ends, _pids(file)))


def test_interrupt_ends_the_program(tmp_path: Path) -> None:
    fifo, file = tmp_path / "fifo", tmp_path / "pids"
    os.mkfifo(fifo)

    def interrupt_when_it_runs() -> None:
        fifo.read_text()  # until the program has opened and closed it
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_it_runs)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        _shell(f"sleep {_NEVER} & echo $$ $! > {file}; echo > {fifo}; wait", _NEVER).run(None, tmp_path)
    thread.join(10)
    assert interrupted.value.__context__ is None, "it came only when the test's time was up"
    assert all(map(_ends, _pids(file)))


def test_program_runs_without_input(tmp_path: Path) -> None:
    Program((sys.executable, "-S", "-c", "import sys; assert not sys.stdin.read()"), 1, 60.0).run(None, tmp_path)


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
def test_ranks_end_before_the_same_step_and_each_leaves_a_trace(
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
    assert len(list(folder.glob("*-*.json"))) == 2
    assert read_recording(folder).settings.host_bytes == 0

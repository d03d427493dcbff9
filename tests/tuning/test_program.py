"""Programs as trials: real processes, which end in bounded time with all that they started."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path

import pytest

from tierstore.errors import ConfigError
from tierstore.store.trial import VARIABLE
from tierstore.tuning.program import Program, TrialFailedError

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
        ("echo alas >&2; exit 3", r"ended with 3; it wrote:\nalas"),
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


def test_program_that_hangs_is_ended_with_its_children_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.tuning.program._END_SECONDS", 0.2)
    file = tmp_path / "pids"
    program = _shell(_WITH_CHILD.format(seconds=_NEVER, file=file), seconds=1.0)
    program.run(None, tmp_path)
    assert len(_pids(file)) == 2
    assert all(map(_ends, _pids(file)))


def test_program_that_leaves_a_child_behind_is_ended_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    _shell(f"sleep {_NEVER} & echo $! > {file}").run(None, tmp_path)
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

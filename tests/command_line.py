"""The command line in this process, since a fresh one takes a second; and a small trace for commands that read one."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tierstore import TierStore, cli, tiered_offload

__all__ = [
    "LENGTH",
    "TENSOR_BYTES",
    "Command",
    "Done",
    "command_of",
    "complaint_of",
    "hear_hangups",
    "record_two_steps",
]

_SIDE = 128
LENGTH, TENSOR_BYTES = 4, _SIDE * _SIDE * 4
"""Of the chain that is recorded: how many tensors a step saves, and how large each is."""


class Done(NamedTuple):
    returncode: object
    stdout: str
    stderr: str


Command = Callable[..., Done]


def hear_hangups() -> None:
    """In a child that is being started: SIGHUP ends it, though it was ignored where the tests were started (nohup)."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def command_of(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `tierstore NAME ...` with the arguments that it is given, on a terminal of 150 columns."""

    def run(*arguments: object) -> Done:
        monkeypatch.setenv("COLUMNS", "150")
        monkeypatch.setattr(sys, "argv", ["tierstore", name, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Done(ended.value.code or 0, *capsys.readouterr())

    return run


def complaint_of(done: Done) -> str:
    """The one line that a command printed which ended with code 2; it says what is wrong."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (complaint,) = done.stderr.strip().splitlines()
    assert complaint.startswith("tierstore: ")
    return complaint


def record_two_steps(folder: Path) -> Path:
    """A trace of two steps whose tensors all go to disk, and are there when backward begins."""
    (folder / "drive").mkdir()
    file = folder / "step.jsonl"
    with TierStore(folder / "drive", host_bytes=0, disk_bytes="1GiB", codec="none") as store:
        for _ in range(2):
            with tiered_offload(store, min_bytes=0, trace=file):
                link = torch.randn(_SIDE, _SIDE, requires_grad=True)
                for _ in range(LENGTH):
                    link = torch.exp(-link)
                loss = link.sum()
            del link
            store.flush()
            loss.backward()
    return file

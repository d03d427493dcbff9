"""`tierstore tune -- COMMAND`, with real programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.command_line import Command, Done, command_of, complaint_of
from tests.daemon.conftest import environment_of_tests
from tierstore import TierStore, tiered_offload

MIB = 2**20
TRAINING = """
import sys, torch
from tierstore import TierStore, tiered_offload
torch.set_num_threads(1)
with TierStore(sys.argv[1], host_bytes="4MiB", staging_bytes="16MiB", disk_bytes="1GiB") as store:
    for _ in range(1000):
        with tiered_offload(store, min_bytes="64KiB"):
            tensor = torch.randn(256, 256, requires_grad=True)
            for _ in range(12):
                tensor = torch.exp(-tensor)
            loss = tensor.sum()
        del tensor
        loss.backward()
print("came to the end")
"""


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is run, and where its temporary files are."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    (directory / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory / "temporary"))
    return directory


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_of("tune", monkeypatch, capsys)


@pytest.fixture
def training(tmp_path: Path, store_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """The command of a program that trains for longer than a trial."""
    for name, value in environment_of_tests().items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    return sys.executable, str(script), str(store_directory)


@pytest.mark.slow
@pytest.mark.timeout(400)  # ten processes import torch
def test_tune_program_ends_with_a_file_and_figures(
    command: Command,
    training: Sequence[str],
    store_directory: Path,
    working_directory: Path,
) -> None:
    done = command("--steps=2", "--rounds=3", "--candidates=1", "--json", "--", *training)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [each["name"] for each in said["candidates"]] == ["defaults", "found 1"]
    reference, found = said["candidates"]
    assert 1 <= len(found["step_seconds"]) <= len(reference["step_seconds"]) <= 3
    assert (reference["host_bytes"], reference["staging_bytes"]) == (4 * MIB, 16 * MIB)
    assert {each["codec"] for each in said["tried"]} == {"none", "floats", "shuffle-zstd:1"}
    assert found["first_seconds"] == min(each["first_seconds"] for each in said["tried"])
    file = working_directory / "tierstore.toml"
    assert tomllib.loads(file.read_text())["store"]["path"] == str(store_directory)
    assert tomllib.loads(file.read_text())["offload"]["min_bytes"] == 64 * 1024
    with TierStore.from_config(file) as store:
        assert tiered_offload.from_config(store, file)
        assert store.host_bytes + store.staging_bytes <= 20 * MIB
    assert "trying settings 3 of 3" in done.stderr
    assert "round 1 of 3: found 1" in done.stderr
    assert list((working_directory / "temporary").iterdir()) == []


NUM_FILES = 4000
"""Of a trial: to remove so many takes long enough for a second signal to come meanwhile."""
HANGING = f"""
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["TIERSTORE_TUNE"]).parent
for number in range({NUM_FILES}):
    folder.joinpath(str(number)).touch()
sys.stdout.close()
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_tune_interrupted_twice_ends_the_program_and_leaves_nothing(
    number: signal.Signals, working_directory: Path, tmp_path: Path
) -> None:
    """The second signal comes while the folder of the trial is being removed."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = [sys.executable, "-S", "-c", HANGING, str(fifo)]
    environment = environment_of_tests(TMPDIR=str(working_directory / "temporary"))
    arguments = [sys.executable, "-m", "tierstore.cli", "tune", "--", *program]
    process = subprocess.Popen(
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    pid = int(fifo.read_text())
    (folder,) = (working_directory / "temporary").iterdir()
    process.send_signal(number)
    while len(os.listdir(folder)) > NUM_FILES:
        assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(working_directory.glob("*")) == [working_directory / "temporary"]
    assert list((working_directory / "temporary").iterdir()) == []


def _complaint(done: Done, code: int) -> str:
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    *_, complaint = [line for line in done.stderr.splitlines() if line.startswith("tierstore: ")]
    assert "Traceback" not in done.stderr
    return complaint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hardware=x", "--", "echo", "alas"), "echo entered no scope of tiered_offload before it ended"),
        (("--", "sh", "-c", "echo alas; exit 3"), "sh ended with exit code 3"),
        (("sh", "-c", "echo alas", "--help"), "entered no scope"),  # options behind the command are its own
        (
            ("--trial-seconds=1", "--", "sh", "-c", "echo alas; exec sleep 1000"),
            "no scope of tiered_offload within 1 s",
        ),
    ],
)
def test_tune_program_that_fails_or_enters_no_scope_is_told_with_its_last_words(
    arguments: tuple[str, ...], words: str, command: Command, working_directory: Path
) -> None:
    done = command(*arguments)
    assert words in _complaint(done, 1)
    assert "alas" in done.stderr
    assert ("--hardware has no effect any more" in done.stderr) is ("--hardware=x" in arguments)
    assert list(working_directory.glob("*.toml")) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"range(1000)": "range(1)"}, "1 step seen, 3 needed"),
        ({"range(1000)": "range(2)", "loss.backward()": "kept = loss"}, "1 step seen, 0 to the end, 3 needed"),
        ({"range(1000)": "range(3)", "64KiB": "1GiB"}, "the store received no saved tensor"),
    ],
)
def test_tune_says_how_many_steps_were_seen_of_a_program_of_too_few(
    changes: Mapping[str, str], words: str, command: Command, training: Sequence[str]
) -> None:
    text = TRAINING
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    Path(training[1]).write_text(text)
    assert words in _complaint(command("--", *training), 1)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--", "/no/such/program"), "COMMAND"),
        (("--", "no-such-program"), "COMMAND"),
        (("--host-bytes", "12 parsecs", "--", "true"), "--host-bytes"),
        (("--host-bytes", "1MiB", "--", "true"), "host_bytes"),
        (("--config", "no/such/folder.toml", "--", "true"), "--config"),
        (("--config", "mine.toml", "--", "true"), "already"),
    ],
)
def test_tune_with_an_argument_that_cannot_be_used_is_refused(
    arguments: tuple[str, ...], word: str, command: Command, working_directory: Path
) -> None:
    (working_directory / "mine.toml").write_text("mine")
    assert word in complaint_of(command(*arguments))
    assert (working_directory / "mine.toml").read_text() == "mine"


def test_tune_used_wrongly_exits_with_2(command: Command) -> None:
    for arguments in ((), ("--rounds=2", "--", "true"), ("--steps=0", "--", "true"), ("--faster",)):
        assert command(*arguments).returncode == 2

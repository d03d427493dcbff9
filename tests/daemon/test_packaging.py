"""The daemon as it is installed: the Dockerfile's build stage, carried out in a directory."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.daemon.conftest import DaemonProcess
from tests.daemon.dockerfile import copy_context, stages_of
from tierstore import TierStore

ROOT = Path(__file__).parents[2]
TARGET = "/opt/tierstore"

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)


def files_below(top: Path) -> set[str]:
    found = set()
    for folder, _, names in os.walk(top, followlinks=True):
        if Path(folder).name != "__pycache__":
            found |= {os.path.relpath(os.path.join(folder, name), top) for name in names}
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the first stage of the Dockerfile has installed the daemon."""
    directory = tmp_path_factory.mktemp("image")
    probe = run(sys.executable, "-m", "pip", "download", "--no-deps", "--retries=1", "xxhash", cwd=directory)
    if probe.returncode:
        pytest.skip(f"pip reaches no package index: {probe.stderr.strip().splitlines()[-1]}")
    stage = stages_of((ROOT / "Dockerfile").read_text())[0]
    tree, target = directory / "src", directory / "installed"
    tree.mkdir()
    copy_context(stage, ROOT, tree)
    (command,) = [instruction.rest for instruction in stage if instruction.word == "RUN"]
    words = [str(target) if word == TARGET else word for word in shlex.split(command)]
    before = files_below(tree)
    done = run(*words, sys.executable, cwd=tree)
    assert done.returncode == 0, done.stderr
    assert files_below(tree) == before, "a later build would take up what this one has left in the tree"
    return target


def of_image(word: str) -> str:
    """What the Dockerfile's last stage says after a word."""
    (rest,) = [each.rest for each in stages_of((ROOT / "Dockerfile").read_text())[-1] if each.word == word]
    return rest


@pytest.fixture
def daemon(installed: Path, tmp_path: Path, short_directory: Path) -> Iterator[DaemonProcess]:
    """Started as the image starts it: by the entry point and the environment."""
    drive, socket, log_file = tmp_path / "drive", short_directory / "d" / "t.sock", tmp_path / "daemon.log"
    drive.mkdir()
    command, *arguments = json.loads(of_image("ENTRYPOINT"))
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [installed / "bin" / command, *arguments],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            env={"TIERSTORE_PATH": str(drive), "TIERSTORE_SOCKET": str(socket)},
        )
    started = DaemonProcess(process, drive, socket, log_file)
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.kill()


def test_image_s_daemon_serves_a_trainer_without_torch(daemon: DaemonProcess, installed: Path) -> None:
    tensor = torch.rand(2**20)
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        handle = store.put(tensor)
        store.flush()
        assert store.stats().spilled_bytes == tensor.nbytes
        assert torch.equal(store.get(handle), tensor)
        loaded = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert str(installed) in loaded
    assert "torch" not in loaded
    done = run(installed / "bin" / "python", "-c", "import torch", cwd=installed)
    assert "ModuleNotFoundError: No module named 'torch'" in done.stderr


def test_installing_over_an_installation_is_refused(tmp_path: Path) -> None:
    present = tmp_path / "installed"
    present.mkdir()
    done = run(ROOT / "deploy" / "install-daemon.sh", present, cwd=tmp_path)
    assert done.returncode == 2
    assert f"{present} exists" in done.stderr
    assert list(present.iterdir()) == []


def test_installation_that_fails_leaves_nothing(tmp_path: Path) -> None:
    interpreter, made = tmp_path / "python", tmp_path / "made"
    interpreter.write_text(f'#!/bin/sh\nmkdir "$3" && realpath "$3" > {made} && exit 3\n')  # gets: -m venv TARGET
    interpreter.chmod(0o700)
    done = run(ROOT / "deploy" / "install-daemon.sh", "target", interpreter, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert made.read_text() == f"{tmp_path / 'target'}\n"
    assert not (tmp_path / "target").exists()

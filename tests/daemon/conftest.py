"""Real daemons: processes of their own, on real directories, ended after each test."""

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.daemon.peer import Peer
from tierstore.sidecar.inspection import inspect_daemon
from tierstore.sidecar.window import SharedSlab
from tierstore.testing import FaultPlan

READY_SECONDS = 120.0
END_SECONDS = 120.0


class DaemonProcess:
    """One daemon. What it says goes to `log_file`; its files are in the directory `path`."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path, socket: Path, log_file: Path) -> None:
        self.process, self.path, self.socket, self.log_file = process, path, socket, log_file

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    def wait_until_ready(self) -> None:
        """Return when it listens, which is before its drive is open; AssertionError with its log if it does not."""
        ends_at = time.monotonic() + READY_SECONDS
        while not self._takes_connections():
            assert self.process.poll() is None, f"exit code {self.process.returncode}: {self.log}"
            assert time.monotonic() < ends_at, f"not ready: {self.log}"
            time.sleep(0.01)  # nothing announces a socket

    def wait_until_open(self) -> None:
        """Return when its drive is open: before that, one that fills up ends it."""
        inspect_daemon(self.socket, seconds=READY_SECONDS)

    def let_everybody_connect(self) -> None:
        """The kernel lets all users in; the daemon may still refuse them."""
        for place, mode in ((self.socket.parent.parent, 0o755), (self.socket.parent, 0o755), (self.socket, 0o666)):
            place.chmod(mode)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self.process.wait(END_SECONDS)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it with a signal; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(END_SECONDS)

    def _takes_connections(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True


StartDaemon = Callable[..., DaemonProcess]


def environment_of_tests(**variables: str) -> dict[str, str]:
    """For processes that a test starts: what it imports, they can; no option of the daemon comes from outside."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIERSTORE_")}
    return inherited | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables


def words_of(options: Mapping[str, object]) -> list[str]:
    return [
        f"--{name.replace('_', '-')}={each}"
        for name, value in options.items()
        for each in (value if isinstance(value, list) else [value])
    ]


def tierstore(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tierstore.cli", *arguments]
    env = environment_of_tests(**({"COLUMNS": "150"} | variables))
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=END_SECONDS)


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """For sockets, whose paths have 107 bytes at most (unix(7))."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        yield Path(folder)


@pytest.fixture
def start_daemon(tmp_path: Path, short_directory: Path) -> Iterator[StartDaemon]:
    with started_daemons(tmp_path, short_directory) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartDaemon]:
    """For daemons that all tests of a module may use."""
    with (
        tempfile.TemporaryDirectory(prefix="ts-") as folder,
        started_daemons(tmp_path_factory.mktemp("shared"), Path(folder)) as start,
    ):
        yield start


@contextmanager
def started_daemons(folder: Path, short_folder: Path) -> Iterator[StartDaemon]:
    """Starts daemons: on `folder / "drive"` unless told otherwise, with options such as `grace_seconds=1`.

    `in_file`: the options are given so. `arguments`, `environment`: as they are, beside. `plan`: of faults in its
    system calls. `program`: in Python, instead of the command; it is given the path and the socket alone.
    """
    started: list[DaemonProcess] = []

    def start(
        path: Path | None = None,
        socket: Path | None = None,
        *,
        in_file: bool = False,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        wait: bool = True,
        plan: FaultPlan | None = None,
        program: str | None = None,
        **options: object,
    ) -> DaemonProcess:
        drive = path or folder / "drive"
        drive.mkdir(exist_ok=True)
        address = socket or short_folder / "d" / "t.sock"
        options = {"path": str(drive), "socket": str(address)} | options
        module = ["tierstore.cli", "serve"] if plan is None else ["tierstore.testing.faulty_daemon", plan.to_json()]
        command = [sys.executable, "-m", *module, *arguments]
        if program is not None:
            command = [sys.executable, "-c", program, str(drive), str(address)]
        elif not in_file:
            command += words_of(options)
        else:
            file = folder / f"daemon-{len(started)}.toml"
            file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()))
            command += ["--config", str(file)]
        log_file = folder / f"daemon-{len(started)}.log"
        with log_file.open("wb") as log:
            env = environment_of_tests(**(environment or {}))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        started.append(DaemonProcess(process, drive, address, log_file))
        if wait:
            started[-1].wait_until_ready()
        return started[-1]

    try:
        yield start
    finally:
        for daemon in started:
            daemon.kill()
            shutil.rmtree(daemon.path, ignore_errors=True)  # a killed daemon leaves gigabytes, as it should


@pytest.fixture
def slab() -> Iterator[SharedSlab]:
    """Number 1, of 4 MiB; a codec needs long for the first of them."""
    slab = SharedSlab(1, 4 * 2**20)
    slab.memory[: 2**20] = bytes(each & 15 for each in random.Random(0).randbytes(2**20))
    yield slab
    slab.close()


@pytest.fixture
async def peer(short_directory: Path) -> AsyncIterator[Peer]:
    peer = Peer(str(short_directory / "s"))
    server = await asyncio.start_unix_server(peer.take_in, peer.address)
    yield peer
    peer.close()
    server.close()
    await server.wait_closed()

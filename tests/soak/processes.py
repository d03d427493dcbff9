"""The processes of a soak: trainers and daemons, started, killed and looked at from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tests.daemon.conftest import DaemonProcess, environment_of_tests, words_of
from tests.soak.orders import Order, Said
from tierstore.daemon.report import DaemonReport
from tierstore.sidecar.inspection import inspect_daemon

__all__ = ["TrainerProcess", "report_of", "start_daemon"]

ROOT = Path(__file__).parents[2]
END_SECONDS = 60.0
_WORD = msgspec.json.Decoder(Said)


class TrainerProcess:
    """A process of `tests.soak.trainer`.

    Args:
        name: for messages, and for its log.
        folder: of its log.
        hear: called on a thread of its own with all it says; None at its end.
    """

    def __init__(self, name: str, folder: Path, hear: Callable[[TrainerProcess, Said | None], None]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._hear = hear
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.trainer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=_environment(),
            )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def order(self, order: Order) -> None:
        """Have it do a round. A process that has just died says so elsewhere."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def dump(self) -> str:
        """What its threads do, and what it has complained of."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
        return self.log.read_text(errors="replace")[-30_000:]

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self._reap()

    def end(self) -> int:
        """Let it end; its exit code. It is killed if it does not."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return self._reap()

    def _reap(self) -> int:
        code = self.process.wait(END_SECONDS)
        self._listener.join(END_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        return code

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                said = _WORD.decode(line)
            except msgspec.DecodeError:
                break  # it was killed in the middle of a word
            self._hear(self, said)
        self._hear(self, None)


def _environment() -> dict[str, str]:
    """A leak shows: no arena for each thread, and no threads that BLAS starts with the first codec that needs numpy."""
    alone = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return environment_of_tests(**alone) | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


def start_daemon(paths: Sequence[Path], folder: Path, name: str, **options: object) -> DaemonProcess:
    """One that is ready, on these directories; its socket and log are in `folder`."""
    socket, log_file = folder / name / "t.sock", folder / f"{name}.log"
    command = [
        sys.executable,
        "-m",
        "tierstore.cli",
        "serve",
        *words_of({"path": [*paths], "socket": socket} | options),
    ]
    with log_file.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=_environment(), cwd=ROOT)
    daemon = DaemonProcess(process, paths[0], socket, log_file)
    try:
        daemon.wait_until_ready()
    except BaseException:
        daemon.kill()
        raise
    return daemon


def report_of(daemon: DaemonProcess) -> DaemonReport:
    """What a living daemon says of itself."""
    return msgspec.json.decode(inspect_daemon(daemon.socket, seconds=30), type=DaemonReport)

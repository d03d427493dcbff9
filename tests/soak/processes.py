"""Trainers and daemons of a soak, started, killed and looked at from outside; and a drive that is nearly full."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.daemon.conftest import DaemonProcess, environment_of_tests, words_of
from tests.reliability.drives import MIB, fill_up, mounted_drive, used_bytes
from tests.soak import trainer
from tests.soak.plan import Order, Said

__all__ = ["TrainerProcess", "files_under", "small_drive", "start_daemon", "surroundings"]

ROOT = Path(__file__).parents[2]
END_SECONDS = 60.0
_SPAWN = multiprocessing.get_context("spawn")
_SMALL_BYTES, _LEFT_BYTES = 48 * MIB, 12 * MIB


class TrainerProcess:
    """A process of `trainer.py`, whose log is in a folder. `words`: from it, and to it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        self.words, its_own = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=trainer.main, args=(its_own, self._log), daemon=True)
        self.process.start()
        its_own.close()

    def hear(self) -> Said | None:
        """Its next word; None: it has ended."""
        try:
            said: Said = self.words.recv()
        except (EOFError, ConnectionError):
            return None
        return said

    def order(self, order: Order) -> None:
        """Have it do a round. A process that has just died says so elsewhere."""
        with suppress(BrokenPipeError):
            self.words.send(order)

    def dump(self) -> str:
        """What its threads do, and what it has complained of."""
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        return self._log.read_text(errors="replace")[-30_000:]

    def end(self) -> int | None:
        """Let it end; its exit code. It is killed if it does not."""
        self.words.close()
        self.process.join(END_SECONDS)
        self.process.kill()
        self.process.join()
        return self.process.exitcode


def start_daemon(paths: Sequence[Path], folder: Path, name: str, **options: object) -> DaemonProcess:
    """One that is ready, on these directories; its socket and log are in `folder`."""
    socket, log_file = folder / name / "t.sock", folder / f"{name}.log"
    words = words_of({"path": [*paths], "socket": socket} | options)
    with log_file.open("ab") as log:
        command = [sys.executable, "-m", "tierstore.cli", "serve", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment_of_tests(), cwd=ROOT)
    daemon = DaemonProcess(process, paths[0], socket, log_file)
    try:
        daemon.wait_until_ready()
    except BaseException:
        daemon.kill()
        raise
    return daemon


def surroundings(folder: Path, *known: int) -> dict[str, list[str]]:
    """What a leak would change: processes of ours but the known ones, shared memory, mounts below the folder.

    Names of fuzzing, which may run at the same time, come and go.
    """
    shared = Path("/dev/shm")
    names = os.listdir(shared) if shared.is_dir() else []
    mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    return {
        "processes": sorted(
            f"{each.pid}" for each in psutil.Process().children(recursive=True) if each.pid not in known
        ),
        "shared memory": sorted(
            name for name in names if "tierstore" in name and not name.startswith("tierstore-fuzz")
        ),
        "mounts": sorted(line.split(" ")[1] for line in mounts if str(folder) in line),
    }


def files_under(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@contextmanager
def small_drive(folder: Path) -> Iterator[Path | None]:
    """A real file system with a few MiB left, which holds the same at the end; None where none can be mounted."""
    with ExitStack() as at_end:
        inside = Path(at_end.enter_context(TemporaryDirectory(dir=folder)))
        try:
            drive = at_end.enter_context(mounted_drive(inside, _SMALL_BYTES))
        except pytest.skip.Exception:
            yield None
            return
        filler = fill_up(drive)
        os.truncate(filler, filler.stat().st_size - _LEFT_BYTES)
        before = files_under(drive), used_bytes(drive)
        yield drive
        after = files_under(drive), used_bytes(drive)
        assert after == before, f"the small drive held {before}, and holds {after}"

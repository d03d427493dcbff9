"""Two hosts on one machine, joined by a cable. Each has a network, processes, /run and /dev/shm of its own.

A host is a set of Linux namespaces that one process holds. The kernel ends all that runs on the host with that process,
and takes the namespaces and the cable away. The process ends when the test closes its standard input, so a killed test
leaves nothing behind either. No namespace has a name, and every host has its own addresses, so runs do not collide.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.daemon.conftest import DaemonProcess, environment_of_tests
from tierstore.commands.views import decode_report
from tierstore.daemon.report import DaemonReport
from tierstore.sidecar.inspection import inspect_daemon

__all__ = ["END_SECONDS", "Host", "two_hosts"]

ROOT = Path(__file__).parents[2]
END_SECONDS = 60.0
CABLE = "cable"
_NAMESPACES = ("--net", "--ipc", "--uts", "--pid", "--mount")

_SET_UP = """
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1" "$2"
hostname "$3"
ip link set lo up
exec "$4" -IS -c '
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of this host leave no zombies
print("ready", flush=True)
sys.stdin.read()
'
"""


class Host:
    """One host.

    Attributes:
        drive: its drive, as its processes see it: every host has one under this path.
        files: where the test sees the files of that drive.
        folder: of its own, for logs and temporary files.
        pid: of the process that holds the namespaces.
    """

    def __init__(self, name: str, address: str, drive: Path, folder: Path) -> None:
        self.name, self.address, self.drive, self.folder = name, address, drive, folder
        self.files, self._temporary = folder / "drive", folder / "tmp"
        self.files.mkdir(parents=True)
        self._temporary.mkdir()
        self._started: list[subprocess.Popen[bytes]] = []
        unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen(
            [*unshare, "sh", "-ec", _SET_UP, "sh", str(self.files), str(drive), name, sys.executable],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            pytest.skip(f"no host can be made here: {self._holder.communicate()[1].strip()}")
        self.pid = psutil.Process(self._holder.pid).children()[0].pid

    def inside(self, path: str) -> Path:
        """Where the test sees a path of this host."""
        return Path(f"/proc/{self.pid}/root{path}")

    @property
    def log(self) -> str:
        return "".join(f"{file.name}:\n{file.read_text()}" for file in sorted(self.folder.glob("*.log")))

    def start(self, name: str, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a process on this host. What it says goes to NAME.log in the host's folder."""
        inside = ["nsenter", f"--target={self.pid}", *_NAMESPACES, *command]
        paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        own = {"TMPDIR": str(self._temporary), "HOME": str(self._temporary), "PYTHONPATH": paths}
        environment = environment_of_tests(**own, **variables)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(inside, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._started.append(process)
        return process

    def start_daemon(self, *options: str) -> subprocess.Popen[bytes]:
        """Keep a daemon on the drive at the default address, started again whenever it is killed.

        The process that is returned ends when the daemon ends with exit code 0.
        """
        serve = [sys.executable, "-m", "tierstore.cli", "serve", f"--path={self.drive}", *options]
        supervisor = self.start("daemon", "sh", "-c", 'until "$@"; do echo started again; done', "sh", *serve)
        DaemonProcess(supervisor, self.files, self._socket, self.folder / "daemon.log").wait_until_ready()
        return supervisor

    def report(self) -> DaemonReport:
        return decode_report(inspect_daemon(self._socket, seconds=END_SECONDS), self.name)

    @property
    def _socket(self) -> Path:
        return self.inside("/run/tierstore/tierstore.sock")

    def processes(self) -> list[psutil.Process]:
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != self.pid and os.readlink(f"/proc/{process.pid}/ns/pid") == own:
                    found.append(process)
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                pass  # it has ended meanwhile
        return found

    def end(self) -> None:
        """End everything that runs on it, and the host itself. Idempotent."""
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            assert pipe is not None
            pipe.close()
        try:
            self._holder.wait(END_SECONDS)
        finally:
            self._holder.kill()
        for process in self._started:
            process.wait(END_SECONDS)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them; skips the test, with the system's words, where there can be none."""
    drive = folder / "nvme"
    drive.mkdir()
    with ExitStack() as at_end:
        hosts = []
        for number, name in enumerate(("east", "west"), 1):
            if shutil.which("unshare") is None:
                pytest.skip("no host can be made here: there is no unshare")
            hosts.append(Host(name, f"10.77.0.{number}", drive, folder / name))
            at_end.callback(hosts[-1].end)
        east, west = hosts
        ends = [f"netns {east.pid}", "type veth peer name", CABLE, f"netns {west.pid}"]
        _ip(f"link add {CABLE}", *ends)
        for host in hosts:
            _ip(f"address add {host.address}/24 dev {CABLE}", host=host)
            _ip(f"link set {CABLE} up", host=host)
        yield east, west


def _ip(*words: str, host: Host | None = None) -> None:
    inside: Sequence[str] = () if host is None else ("nsenter", f"--target={host.pid}", "--net")
    command = [*inside, "ip", *" ".join(words).split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_SECONDS)
    if done.returncode != 0:
        pytest.skip(f"no network can be made here: {done.stderr.strip()}")

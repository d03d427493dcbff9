"""`tierstore stat` and `tierstore top` beside a real daemon, and beside none."""

import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from rich.console import Console

from tests.daemon import wire
from tests.daemon.clients import report_of
from tests.daemon.conftest import DaemonProcess, StartDaemon, environment_of_tests, tierstore
from tierstore import TierStore
from tierstore.commands.views import Rates, decode_report, rates_between, top_view
from tierstore.commands.watch import watch_daemon
from tierstore.daemon.report import DaemonReport, Totals, encode_report
from tierstore.errors import DaemonUnavailableError, ProtocolError
from tierstore.sidecar.inspection import inspect_daemon

MIB, GIB = 2**20, 2**30
SECONDS = 60.0


@pytest.fixture(scope="module")
def daemon(start_shared_daemon: StartDaemon) -> DaemonProcess:
    return start_shared_daemon(codec="none", grace_seconds=1000)


@pytest.fixture(scope="module", autouse=True)
def store(daemon: DaemonProcess) -> Iterator[TierStore]:
    """With one record of 1 MiB that was restored once."""
    with TierStore.connect(daemon.socket, host_bytes=0, name="train.py") as store:
        handle = store.put(torch.randn(MIB // 4))
        store.flush()
        store.get(handle)
        yield store
        del handle


def test_report_of_very_many_sessions_fits_one_frame(daemon: DaemonProcess) -> None:
    report = report_of(daemon)
    sessions = [replace(report.sessions[0], session=number, client="é" * 256) for number in range(5000)]
    encoded = encode_report(replace(report, sessions=sessions, num_sessions=5000))
    assert len(wire.frame_of([wire.Report(encoded)])) <= wire.MAX_FRAME_BYTES
    shown = decode_report(encoded, "here")
    assert shown.num_sessions == 5000
    assert 100 < len(shown.sessions) < 5000


def test_report_of_very_many_kinds_of_records_fits_one_frame(daemon: DaemonProcess) -> None:
    report = report_of(daemon)
    choices = {f"{number} " + "\x01" * 500: {"none": number + 1, "zstd:1": 1} for number in range(1024)}
    choices["others"] = {"none": 5}
    encoded = encode_report(replace(report, codec_choices=choices))
    assert len(wire.frame_of([wire.Report(encoded)])) <= wire.MAX_FRAME_BYTES
    shown = decode_report(encoded, "here")
    assert shown.sessions == report.sessions, "which have room enough"
    assert shown.codec_choices == {}


def test_rates_are_differences_of_one_daemon(daemon: DaemonProcess) -> None:
    later = report_of(daemon)
    before = [replace(later.sessions[0], totals=Totals())]
    earlier = replace(later, uptime_seconds=later.uptime_seconds - 2, totals=Totals(), sessions=before)
    rates = rates_between(earlier, later)
    assert rates is not None
    assert (rates.spilled_bytes, rates.restored_bytes) == pytest.approx((MIB / 2, MIB / 2))
    assert rates.of_sessions[later.sessions[0].session] == pytest.approx((MIB / 2, MIB / 2))
    assert rates_between(None, later) is None
    assert rates_between(later, later) is None
    assert rates_between(replace(earlier, pid=1), later) is None


@pytest.mark.parametrize("columns", [80, 200])
def test_stat_prints_tables_and_cuts_no_figure_however_narrow_the_terminal(daemon: DaemonProcess, columns: int) -> None:
    done = tierstore("stat", "--socket", str(daemon.socket), COLUMNS=str(columns))
    assert (done.returncode, done.stderr) == (0, "")
    assert "…" not in done.stdout
    figures = (
        "1 session",
        "connected",
        "session",
        "quota",
        "records",
        "queued",
        "restored",
        "1 MiB",
        "float32",
        "0 running, 0 queued",
        "1 as none",
    )
    for word in (*figures, "train.py", str(os.getpid())):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines()[1:])) <= columns


@pytest.mark.parametrize("are_rates", [False, True], ids=["totals", "rates"])
def test_what_a_session_holds_is_one_line_of_80_columns_on_a_large_drive(
    daemon: DaemonProcess, are_rates: bool
) -> None:
    report = report_of(daemon)
    totals = Totals(spilled_bytes=987 * GIB, restored_bytes=986 * GIB)
    large = replace(
        report.sessions[0],
        session=123_456,
        disk_bytes=321 * GIB,
        quota_bytes=654 * GIB,
        num_records=1_000_000,
        queued_bytes=255 * MIB,
        totals=totals,
    )
    report = replace(report, sessions=[large])
    rates = Rates(0, 0, {large.session: (1.5 * GIB, 999 * MIB)}) if are_rates else None
    moved = ("1.50 GiB/s", "999 MiB/s") if are_rates else ("987.00 GiB", "986.00 GiB")
    console = Console(width=80, file=io.StringIO())
    console.print(top_view(report, rates))
    lines = [" ".join(re.sub("[│┃]", " ", line).split()) for line in console.file.getvalue().splitlines()]
    assert "session on disk quota records jobs queued spilled restored" in lines
    assert f"123456 321.00 GiB 654.00 GiB 1000000 0 255 MiB {' '.join(moved)}" in lines


def test_socket_below_the_home_directory_is_found(daemon: DaemonProcess) -> None:
    home, name = str(daemon.socket.parent), f"~/{daemon.socket.name}"
    for given in ({"HOME": home, "TIERSTORE_SOCKET": name}, {"HOME": home}):
        done = tierstore("stat", *(() if "TIERSTORE_SOCKET" in given else ("--socket", name)), **given)
        assert done.returncode == 0, done.stderr


def test_stat_json_is_the_report(daemon: DaemonProcess) -> None:
    done = tierstore("stat", "--json", TIERSTORE_SOCKET=str(daemon.socket))
    assert done.returncode == 0, done.stderr
    found = msgspec.convert(json.loads(done.stdout), DaemonReport)
    assert replace(found, uptime_seconds=0) == replace(report_of(daemon), uptime_seconds=0)
    with pytest.raises(ProtocolError, match="another version"):
        decode_report(b"{}", "/run/s")


@pytest.mark.parametrize("command", ["stat --json", "top --iterations=1", "top --iterations=1 --json"])
def test_no_daemon_exits_1_and_says_how_to_start_one(command: str, tmp_path: Path) -> None:
    done = tierstore(*command.split(), "--socket", str(tmp_path / "s"), COLUMNS="1000")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    complaint = done.stderr if command.startswith("stat") else done.stdout
    if command == "top --iterations=1 --json":
        update = json.loads(complaint)
        assert (update["report"], update["rates"]) == (None, None)
        complaint = update["error"]
    assert f"no daemon is available at {tmp_path / 's'}" in complaint
    assert "No such file or directory" in complaint
    assert f"Start one with: tierstore serve --path DIRECTORY --socket {tmp_path / 's'}" in complaint
    if command == "stat --json":
        assert tierstore("stat", "--socket", str(tmp_path)).stderr.endswith("what has that name is not a socket\n")


class Impostor:
    """Takes one connection, says something, and then nothing more until it is left."""

    def __init__(self, path: Path, said: bytes, *, leaves: bool = False, drips: bool = False) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._said, self._leaves, self._drips = said, leaves, drips
        self._thread = threading.Thread(target=self._talk)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(SECONDS)
        self._listener.close()

    def _talk(self) -> None:
        with self._listener.accept()[0] as connection:
            connection.recv(4096)  # Hello
            connection.sendall(self._said)
            try:
                while self._drips:
                    connection.sendall(b"\0")
            except OSError:  # the visitor has left
                return
            while not self._leaves and connection.recv(4096):
                pass


WELCOME = wire.Welcome(wire.VERSION, "impostor", 1, 1.0)
ENDLESS = wire.MAX_FRAME_BYTES.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("said", "then", "error", "words"),
    [
        (b"", "silent", DaemonUnavailableError, "does not answer"),
        (b"\x10\0", "silent", DaemonUnavailableError, "does not answer"),
        (wire.frame_of([WELCOME]), "silent", DaemonUnavailableError, "does not answer"),
        (ENDLESS, "drips", DaemonUnavailableError, "does not answer"),
        (b"", "leaves", DaemonUnavailableError, "closed the connection"),
        (wire.frame_of([wire.Refused("user 7 may not")]), "silent", DaemonUnavailableError, "refuses: user 7 may not"),
        (wire.frame_of([wire.Closed()]), "silent", ProtocolError, None),
        (b"HTTP/1.1 400 Bad Request", "silent", ProtocolError, None),
        (b"\x01\0\0\0\x00", "silent", ProtocolError, None),
    ],
)
def test_whoever_speaks_otherwise_or_comes_to_no_end_is_given_up(
    short_directory: Path, said: bytes, then: str, error: type[Exception], words: str | None
) -> None:
    impostor = Impostor(short_directory / "s", said, leaves=then == "leaves", drips=then == "drips")
    with impostor, pytest.raises(error, match=words) as given_up:
        inspect_daemon(short_directory / "s", seconds=0.2 if words == "does not answer" else 30)
    assert getattr(given_up.value, "waited_seconds", 0) < 10


@pytest.mark.parametrize(("report", "options"), [(b"{", []), (b'"\xff"', ["--json"]), (b"[" * 100_000, ["--json"])])
def test_report_that_is_no_json_is_a_line_of_complaint(
    short_directory: Path, report: bytes, options: list[str]
) -> None:
    with Impostor(short_directory / "s", wire.frame_of([WELCOME, wire.Report(report)])):
        done = tierstore("stat", "--socket", str(short_directory / "s"), *options)
    assert done.returncode == 1
    (complaint,) = done.stderr.splitlines()
    assert "a report" in complaint


def test_stopped_daemon_does_not_answer(daemon: DaemonProcess) -> None:
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        done = tierstore("stat", "--socket", str(daemon.socket))
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert (done.returncode, done.stdout) == (1, "")
    (complaint,) = done.stderr.splitlines()
    assert "it does not answer" in complaint


def test_top_as_json_is_a_line_for_each_update(daemon: DaemonProcess) -> None:
    done = tierstore("top", "--json", "--socket", str(daemon.socket), "--iterations=2", "--interval=0.1")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["error"], first["rates"], second["error"]) == (None, None, None)
    report = msgspec.convert(second["report"], DaemonReport)
    assert replace(report, uptime_seconds=0) == replace(report_of(daemon), uptime_seconds=0)
    assert second["rates"]["spilled_bytes"] == 0
    assert list(second["rates"]["of_sessions"].values()) == [[0, 0]]


def test_top_as_json_is_written_at_once(daemon: DaemonProcess) -> None:
    command = [sys.executable, "-m", "tierstore.cli", "top", "--json", "--socket", str(daemon.socket)]
    process = subprocess.Popen(
        [*command, "--interval=3600"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment_of_tests(PYTHONUNBUFFERED=""),
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["report"]["pid"] == daemon.process.pid
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=SECONDS)[0] == ""
    assert process.returncode == 0


def test_top_that_is_interrupted_without_a_terminal_ends_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    assert watch_daemon(str(tmp_path / "s"), 1.0, None)
    assert capsys.readouterr().out.endswith("press Ctrl-C to end\n")


class Terminal:
    def __init__(self, address: Path) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "tierstore.cli", "top", "--socket", str(address), "--interval", "0.1"]
        env = environment_of_tests(TERM="xterm", COLUMNS="200", LINES="40")
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def wait_for(self, word: str) -> None:
        """Return when the word has been shown since the last time."""
        ends_at = time.monotonic() + SECONDS
        while word not in self.shown:
            assert time.monotonic() < ends_at, self.shown
            if select.select([self._master], [], [], 1.0)[0]:
                self.shown += os.read(self._master, 65536).decode(errors="replace")
        self.shown = self.shown.partition(word)[2]

    def drain(self) -> str:
        """All that is left, once the program has ended."""
        while select.select([self._master], [], [], 0)[0]:
            try:
                self.shown += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # EIO: nobody has the other end any more
                break
        return self.shown

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(SECONDS)
        os.close(self._master)


def _leave(terminal: Terminal, number: signal.Signals) -> None:
    terminal.process.send_signal(number)
    assert terminal.process.wait(SECONDS) == 0
    shown = terminal.drain()
    assert "Traceback" not in shown
    assert "\x1b[?1049l" in shown, "it gives the screen back"
    assert "\x1b[?25h" in shown, "and the cursor"


def test_top_follows_the_daemon_until_it_is_interrupted(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    terminal = Terminal(daemon.socket)
    try:
        terminal.wait_for("no sessions")
        with TierStore.connect(daemon.socket, host_bytes=0, name="train.py"):
            terminal.wait_for("train.py")
        terminal.wait_for("no sessions")
        daemon.kill()
        terminal.wait_for("no daemon is available at")
        terminal.wait_for("trying again")
        again = start_daemon(daemon.path, daemon.socket)
        terminal.wait_for(f"process {again.process.pid}")
        _leave(terminal, signal.SIGINT)
    finally:
        terminal.close()


def test_top_leaves_when_it_is_told_to(daemon: DaemonProcess) -> None:
    terminal = Terminal(daemon.socket)
    try:
        terminal.wait_for(f"process {daemon.process.pid}")
        _leave(terminal, signal.SIGTERM)
    finally:
        terminal.close()


def test_what_cannot_be_written_is_one_line_and_code_1(daemon: DaemonProcess) -> None:
    def run_into(output: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        line, env = [sys.executable, "-m", "tierstore.cli", *arguments], environment_of_tests(**variables)
        with open(output, "w") as file:
            return subprocess.run(line, stdout=file, stderr=subprocess.PIPE, text=True, env=env, timeout=SECONDS)

    at = f"--socket={daemon.socket}"
    cases = [["stat", at], ["top", "--iterations=1", at], ["top", "--json", at], ["--help"]]
    for arguments in cases:
        done = run_into("/dev/full", *arguments, PYTHONUNBUFFERED="1" if arguments == ["--help"] else "")
        assert done.stderr == "tierstore: standard output cannot be written: No space left on device\n", arguments
        assert done.returncode == 1
    reader, writer = os.pipe()
    os.close(reader)
    done = run_into(f"/proc/self/fd/{writer}", "stat", at)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, ""), "nobody reads it any more"


def test_terminal_that_has_no_such_letters_gets_others(daemon: DaemonProcess) -> None:
    done = tierstore("top", "--iterations=1", "--socket", str(daemon.socket), PYTHONIOENCODING="latin-1")
    assert (done.returncode, "train.py" in done.stdout) == (0, True), done.stderr

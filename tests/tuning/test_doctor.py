"""`tierstore doctor` as a stranger meets it, on real drives."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

from tests.cgroups import made_cgroup
from tests.command_line import Command, Done, command_of, complaint_of, hear_hangups
from tests.daemon.conftest import StartDaemon, environment_of_tests, short_directory, start_daemon
from tests.daemon.test_false_daemon import listening_as
from tests.processes import output_of, python
from tests.reliability.drives import fill_up, mounted_drive, used_bytes
from tierstore import TierStore, tiered_offload
from tierstore.base.device_files import has_driver
from tierstore.tuning import system
from tierstore.tuning.findings import Finding
from tierstore.tuning.report import Report
from tierstore.tuning.system import find_daemon

__all__ = ["short_directory", "start_daemon"]

MIB = 2**20
SECONDS = 120.0
QUICK = ("--seconds", "1", "--socket", "/nonexistent/tierstore.sock")


def command(directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tierstore.cli", "doctor", str(directory), *QUICK, *arguments]


def report_in(done: Done | subprocess.CompletedProcess[str], directory: Path) -> Report:
    report = msgspec.json.decode(done.stdout, type=Report)
    assert done.returncode == (0 if report.is_usable else 1)
    assert {each.name for each in directory.iterdir()} <= {"lost+found"}
    return report


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_of("doctor", monkeypatch, capsys)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of its own."""
    with mounted_drive(tmp_path, 192 * MIB) as directory:
        yield directory


class Examined(NamedTuple):
    drive: Path
    report: Report
    shown: bytes
    imported_torch: str
    config: Path


_RELATIVE = """
import pathlib, sys, tierstore.cli
folder, *sys.argv[1:] = sys.argv[1:]
try:
    tierstore.cli.main()
finally:
    pathlib.Path(folder, "torch").write_text(str("torch" in sys.modules))
"""


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examined]:
    """One run, from within the directory, with a setting of malloc, its progress on a terminal."""
    folder = tmp_path_factory.mktemp("examined")
    config = folder / "tierstore.toml"
    with mounted_drive(tmp_path_factory.mktemp("drive"), 192 * MIB) as drive:
        before_bytes = used_bytes(drive)
        options = (*QUICK, "--json", f"--config={config}")
        mine, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", _RELATIVE, str(folder), "doctor", ".", *options],
            cwd=drive,
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            env=environment_of_tests(TERM="xterm", MALLOC_TOP_PAD_="0", TIERSTORE_ALLOCATOR="0"),
        )
        os.close(theirs)
        shown = b"".join(iter(lambda: _read_terminal(mine), b""))
        os.close(mine)
        output, _ = process.communicate(timeout=SECONDS)
        report = report_in(Done(process.returncode, output, ""), drive)
        assert used_bytes(drive) == before_bytes
        yield Examined(drive, report, shown, (folder / "torch").read_text(), config)


def _read_terminal(descriptor: int) -> bytes:
    """What is there next; nothing once nobody writes any more (EIO, on Linux)."""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""


def test_report_of_a_drive_has_what_was_measured_without_torch_and_names_the_setting_of_malloc(
    examined: Examined,
) -> None:
    measured = examined.report.measurements
    assert measured.drive.path == str(examined.drive)
    assert measured.drive.writes
    assert measured.drive.reads
    assert {each.data for each in measured.codecs} >= {"noise", "activations, bfloat16", "masks", "zeros"}
    assert measured.memory.copy_bytes_per_second > 0
    assert measured.processor.load is not None
    assert examined.report.is_busy == measured.processor.is_busy
    assert "little-space" in codes(examined.report)
    assert b"measuring for about 1 s" in examined.shown, "on a terminal"
    assert has_driver() or examined.imported_torch == "False"
    if examined.report.measurements.memory.allocator == "glibc":
        (finding,) = [each for each in examined.report.findings if each.code == "memory-not-returned"]
        assert "MALLOC_TOP_PAD_ is set" in finding.sentence


def test_load_of_the_machine_is_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pressure = tmp_path / "cpu"
    monkeypatch.setattr(system, "_CPU_PRESSURE", pressure)
    assert system.describe_processor().waiting_share is None
    pressure.write_text("some avg10=82.80 avg60=79.62 avg300=49.67 total=2\nfull avg10=0.00 avg60=0.00 total=0\n")
    monkeypatch.setattr(os, "getloadavg", lambda: (11.25, 2.0, 1.0))
    measured = system.describe_processor()
    assert (measured.load, measured.waiting_share, measured.is_busy) == (11.25, 0.828, True)


def test_file_is_made_and_a_store_is_opened_with_it(examined: Examined) -> None:
    with TierStore.from_config(examined.config, host_bytes=0) as store:
        weight = torch.ones(MIB, requires_grad=True)
        with tiered_offload.from_config(store, examined.config, min_bytes=0):
            loss = weight.exp().sum()
        store.flush()
        assert store.stats().disk_bytes > 0
        loss.backward()
        assert torch.equal(weight.grad, weight.detach().exp())  # type: ignore[arg-type]


def test_full_drive_is_a_problem_and_the_rest_is_measured_and_a_read_only_one_is_refused(
    doctor: Command, drive: Path
) -> None:
    filler = fill_up(drive)
    done = doctor(drive, *QUICK)
    filler.unlink()
    assert (done.returncode, done.stderr) == (1, "")
    for words in ("too little to measure", "memory copies", "Offloading does not work well here"):
        assert words in done.stdout

    subprocess.run(["mount", "-o", "remount,ro", drive], check=True)
    assert "cannot be written to" in complaint_of(doctor(drive, *QUICK))


def test_arguments_that_cannot_be_used_are_refused_before_anything_is_measured(doctor: Command, tmp_path: Path) -> None:
    """Also a file in a folder that may not be looked into: a name too long stands for one, since root may look
    anywhere."""
    mine, too_long = tmp_path / "mine.toml", tmp_path / ("x" * 300)
    mine.write_text("precious")
    for arguments, words in (
        ((tmp_path / "missing", *QUICK), "no such directory"),
        ((mine, *QUICK), "not a directory"),
        ((tmp_path, "--config", mine), "already"),
        ((tmp_path, "--config", tmp_path / "missing" / "file"), "no such directory"),
        ((tmp_path, "--config", too_long), "--config"),
        ((tmp_path, "--config", too_long / "a.toml"), "--config"),
    ):
        assert words in " ".join(complaint_of(doctor(*arguments)).split())
    for seconds in ("0", "nan"):
        done = doctor(tmp_path, "--seconds", seconds)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--seconds" in done.stderr
    assert mine.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [mine]


def test_doctor_whose_output_is_closed_says_nothing_of_that(tmp_path: Path) -> None:
    done = python("-m", "tierstore.cli", "doctor", tmp_path, *QUICK, before=("sh", "-c", 'exec "$@" >&-', "sh"))
    assert (done.returncode in (0, 1), done.stderr) == (True, "")


def test_daemon_that_keeps_the_directory_is_recommended(start_daemon: StartDaemon, doctor: Command) -> None:
    daemon = start_daemon(codec="none")
    done = doctor(daemon.path, "--seconds", "1", "--socket", daemon.socket, "--json")
    report = msgspec.json.decode(done.stdout, type=Report)
    assert "daemon-runs" in codes(report)
    assert {each.name: each.value for each in report.settings}["connect"] == str(daemon.socket)


def test_daemon_that_was_started_with_a_relative_path_is_found_from_elsewhere(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    daemon = start_daemon(Path("drive"), codec="none")
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", str(daemon.socket.parent))
    found = find_daemon(f"~/{daemon.socket.name}", tmp_path / "drive")
    assert (found.path, found.keeps_directory) == (str(tmp_path / "drive"), True)


def test_socket_that_nobody_listens_on_is_said(short_directory: Path, tmp_path: Path) -> None:
    address = short_directory / "t.sock"
    assert not find_daemon(str(address), tmp_path).is_present
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(address))
        daemon = find_daemon(str(address), tmp_path)
    assert (daemon.is_present, daemon.is_answering, daemon.path) == (True, False, None)
    assert "refused" in (daemon.note or "")


_NOT_ROOT = 64_987
"""An ordinary user whom no machine has."""

_AS_ANOTHER = """
import os, sys
from pathlib import Path
from tierstore.tuning.system import find_daemon
socket, number = sys.argv[1:]
os.setgroups([])
os.setgid(int(number))
os.setuid(int(number))
daemon = find_daemon(socket, Path("/"))
print(daemon.is_present, daemon.is_refusing, daemon.note)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_daemon_in_a_folder_that_this_user_may_not_enter_is_said(start_daemon: StartDaemon) -> None:
    found = output_of(_AS_ANOTHER, start_daemon().socket, _NOT_ROOT)
    assert found.split() == ["True", "True", "Permission", "denied"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as another user")
def test_daemon_of_another_user_is_spoken_to_if_its_user_is_named(
    short_directory: Path, doctor: Command, drive: Path
) -> None:
    """This one listens and never answers."""
    with listening_as(_NOT_ROOT, short_directory / "s"):
        arguments = (drive, "--seconds", "1", "--socket", short_directory / "s", "--json")
        (refused,) = _daemons(report_in(doctor(*arguments), drive))
        (silent,) = _daemons(report_in(doctor(*arguments, "--daemon-uid", _NOT_ROOT), drive))
    assert (refused.code, silent.code) == ("daemon-refuses", "daemon-silent")
    assert f"may not use it: it is a daemon of user {_NOT_ROOT}" in refused.sentence
    assert "--daemon-uid" in (refused.advice or "")


def _daemons(report: Report) -> list[Finding]:
    return [each for each in report.findings if each.code.startswith("daemon-")]


_IN_GROUP = """
import os, sys
for group in sys.argv[1].split(","):
    with open(group + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-m", "tierstore.cli", "doctor", *sys.argv[2:]])
"""


def run_in(groups: list[Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command inside of control groups."""
    line = [sys.executable, "-c", _IN_GROUP, ",".join(map(str, groups)), *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=environment_of_tests(), timeout=SECONDS)


def test_limits_of_control_groups_are_found_and_kept_to(drive: Path) -> None:
    limit_bytes = 400 * MIB
    with (
        made_cgroup("memory", memory__limit_in_bytes=limit_bytes) as memory,
        made_cgroup("cpu", cpu__cfs_quota_us=90_000, cpu__cfs_period_us=100_000) as cpu,  # less than any machine has
    ):
        report = report_in(run_in([memory, cpu], str(drive), *QUICK, "--json"), drive)
    measured = report.measurements
    assert {"little-memory", "cpu-quota", "one-core"} <= codes(report)
    assert (measured.memory.limit_bytes, measured.processor.quota_cores) == (limit_bytes, 0.9)
    assert measured.memory.available_bytes < limit_bytes
    assert not report.is_usable


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_end_in_the_middle_leaves_nothing_behind(number: signal.Signals, drive: Path) -> None:
    before_bytes = used_bytes(drive)
    line = command(drive, "--seconds", "40")
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment_of_tests(),
        preexec_fn=hear_hangups,
    )
    while used_bytes(drive) < before_bytes + 16 * MIB:
        assert process.poll() is None, "it has not used the drive"
        time.sleep(0.01)  # nobody announces what a file system holds
    process.send_signal(number)
    output, said = process.communicate(timeout=SECONDS)
    assert process.returncode not in (0, 1, 2)
    assert output == b""
    assert b"Traceback" not in said
    assert used_bytes(drive) == before_bytes
    assert {each.name for each in drive.iterdir()} <= {"lost+found"}


@pytest.mark.slow
def test_drive_that_hangs_is_given_up_and_the_rest_is_reported(drive: Path) -> None:
    """A frozen file system: whoever writes to it waits in the kernel, and cannot be killed."""
    if subprocess.run(["fsfreeze", "--freeze", drive], capture_output=True).returncode != 0:
        pytest.skip("no file system can be frozen here")
    frozen = True
    try:
        process = subprocess.Popen(command(drive, "--json"), stdout=subprocess.PIPE, env=environment_of_tests())
        assert process.stdout is not None
        text = b""
        while not text.endswith(b"\n}\n"):
            piece = os.read(process.stdout.fileno(), 2**16)
            assert piece, text
            text += piece
        subprocess.run(["fsfreeze", "--unfreeze", drive], check=True)
        frozen = False
        process.communicate(timeout=SECONDS)
    finally:
        if frozen:
            subprocess.run(["fsfreeze", "--unfreeze", drive], check=True)
    report = msgspec.json.decode(text, type=Report)
    assert report.findings[0].code == "drive-fails"
    assert "did not answer" in report.findings[0].sentence
    assert report.measurements.codecs

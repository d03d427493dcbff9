"""`tierstore doctor` as a stranger meets it: a process of its own, on real drives."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.cgroups import made_cgroup
from tests.command_line import hear_hangups
from tests.daemon.conftest import StartDaemon, environment_of_tests, short_directory, start_daemon, tierstore
from tests.reliability.drives import fill_up, mounted_drive, used_bytes
from tierstore import TierStore, tiered_offload
from tierstore.base.device_files import has_driver
from tierstore.hardware import read_hardware
from tierstore.tuning.report import Report
from tierstore.tuning.system import find_daemon

__all__ = ["short_directory", "start_daemon"]

MIB = 2**20
SECONDS = 120.0
QUICK = ("--seconds", "1", "--socket", "/nonexistent/tierstore.sock")


def command(directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tierstore.cli", "doctor", str(directory), *QUICK, *arguments]


def examined(directory: Path, *arguments: str) -> Report:
    """The report of a run in which nothing went wrong but what it reports; nothing is left behind."""
    before_bytes = used_bytes(directory)
    return report_in(tierstore("doctor", str(directory), *QUICK, *arguments, "--json"), directory, before_bytes)


def report_in(done: subprocess.CompletedProcess[str], directory: Path, before_bytes: int | None = None) -> Report:
    assert done.stderr == ""
    report = msgspec.json.decode(done.stdout, type=Report)
    assert done.returncode == (0 if report.is_usable else 1)
    assert {each.name for each in directory.iterdir()} <= {"lost+found"}
    if before_bytes is not None and report.measurements.drive.path.endswith("mounted"):
        assert used_bytes(directory) == before_bytes
    return report


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of its own."""
    with mounted_drive(tmp_path, 192 * MIB) as directory:
        yield directory


def test_report_of_a_drive(drive: Path) -> None:
    report = examined(drive)
    measured = report.measurements
    assert measured.drive.path == str(drive)
    assert measured.drive.writes
    assert measured.drive.reads
    assert {each.data for each in measured.codecs} >= {"noise", "activations, bfloat16", "masks", "zeros"}
    assert measured.memory.copy_bytes_per_second > 0
    assert "little-space" in codes(report)


def test_setting_of_malloc_is_named_as_what_keeps_freed_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    report = examined(tmp_path)
    if report.measurements.memory.allocator == "glibc":
        (finding,) = [each for each in report.findings if each.code == "memory-not-returned"]
        assert "MALLOC_ARENA_MAX is set" in finding.sentence


def test_report_of_memory_says_that_it_is_and_what_that_means(tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no writable /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        report = examined(Path(folder))
        done = tierstore("doctor", folder, *QUICK, "--config", str(tmp_path / "tierstore.toml"))
    assert "not fit for a store" in " ".join(done.stderr.split())
    assert "\npath = " not in (tmp_path / "tierstore.toml").read_text()
    (finding,) = [each for each in report.findings if each.code == "in-memory"]
    assert finding.severity == ("warning" if report.measurements.accelerators.links else "problem")


def test_full_drive_is_a_problem_and_the_rest_is_measured(drive: Path) -> None:
    filler = fill_up(drive)
    done = tierstore("doctor", str(drive), *QUICK)
    filler.unlink()
    assert (done.returncode, done.stderr) == (1, "")
    assert "too little to measure" in done.stdout
    assert "memory copies" in done.stdout
    assert "Offloading does not work well here" in done.stdout


# --- arguments and files ----------------------------------------------------------------------------------------------


def test_directory_that_cannot_be_used_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, words in (("missing", "no such directory"), ("file", "not a directory")):
        done = tierstore("doctor", str(tmp_path / name), *QUICK)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_directory_that_is_read_only_exit_code_2(drive: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", drive], check=True)
    done = tierstore("doctor", str(drive), *QUICK)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be written to" in done.stderr


@pytest.mark.parametrize("seconds", ["0", "nan"])
def test_seconds_out_of_range_exit_code_2(seconds: str, tmp_path: Path) -> None:
    done = tierstore("doctor", str(tmp_path), "--seconds", seconds)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--seconds" in done.stderr


def test_files_that_cannot_be_made_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("precious")
    missing = tmp_path / "missing" / "file"
    for option, file, words in (("--config", mine, "already"), ("--hardware", missing, "no such directory")):
        done = tierstore("doctor", str(tmp_path), *QUICK, option, str(file))
        assert (done.returncode, done.stdout) == (2, "")
        assert option in done.stderr
        assert words in done.stderr
    assert mine.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [mine]


def test_files_are_made_and_a_store_is_opened_with_them(drive: Path, tmp_path: Path) -> None:
    config, hardware = tmp_path / "tierstore.toml", tmp_path / "hw.toml"
    report = examined(drive, "--config", str(config), "--hardware", str(hardware))
    described = read_hardware(hardware)
    assert (described.drive.writes, described.codecs) == (report.measurements.drive.writes, report.measurements.codecs)
    with TierStore.from_config(config, host_bytes=0) as store:
        weight = torch.ones(MIB, requires_grad=True)
        with tiered_offload.from_config(store, config, min_bytes=0):
            loss = weight.exp().sum()
        store.flush()
        assert store.stats().disk_bytes > 0
        loss.backward()
        assert torch.equal(weight.grad, weight.detach().exp())  # type: ignore[arg-type]


def test_progress_is_shown_on_a_terminal_only(tmp_path: Path) -> None:
    mine, theirs = pty.openpty()
    env = environment_of_tests(TERM="xterm")
    process = subprocess.Popen(command(tmp_path, "--json"), stdout=subprocess.PIPE, stderr=theirs, env=env)
    os.close(theirs)
    shown = b"".join(iter(lambda: read_terminal(mine), b""))
    os.close(mine)
    output, _ = process.communicate(timeout=SECONDS)
    assert b"codecs" in shown
    assert json.loads(output)["version"] == 1


def read_terminal(descriptor: int) -> bytes:
    """What is there next; nothing once nobody writes any more (EIO, on Linux)."""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""


def test_file_that_cannot_be_made_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """Also in a folder that may not be looked into: a name too long stands for one, since root may look anywhere."""
    for file in (tmp_path / ("x" * 300) / "a.toml", tmp_path / ("x" * 300), tmp_path / "no" / "a.toml"):
        done = tierstore("doctor", str(tmp_path), "--seconds", "40", "--config", str(file))
        assert (done.returncode, done.stdout) == (2, "")
        assert "--config" in done.stderr
        assert "Traceback" not in done.stderr
    done = tierstore("doctor", str(tmp_path), "--config", f"{tmp_path}/a", "--hardware", f"{tmp_path}/./a")
    assert done.returncode == 2
    assert "--config is this file" in " ".join(done.stderr.split())


# --- daemons ----------------------------------------------------------------------------------------------------------


def test_daemon_that_keeps_the_directory_is_recommended(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon(codec="none")
    done = tierstore("doctor", str(daemon.path), "--seconds", "1", "--socket", str(daemon.socket), "--json")
    report = msgspec.json.decode(done.stdout, type=Report)
    assert "daemon-runs" in codes(report)
    assert {each.name: each.value for each in report.settings}["connect"] == str(daemon.socket)


def test_socket_that_nobody_listens_on_is_said(short_directory: Path, tmp_path: Path) -> None:
    address = short_directory / "t.sock"
    assert not find_daemon(str(address), tmp_path).is_present
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(address))
        daemon = find_daemon(str(address), tmp_path)
    assert (daemon.is_present, daemon.is_answering, daemon.path) == (True, False, None)
    assert "refused" in (daemon.note or "")


# --- limits -----------------------------------------------------------------------------------------------------------

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
    assert {"memory-limit", "little-memory", "cpu-quota", "one-core"} <= codes(report)
    assert (measured.memory.limit_bytes, measured.processor.quota_cores) == (limit_bytes, 0.9)
    assert measured.memory.available_bytes < limit_bytes
    assert not report.is_usable


# An ordinary user who may read what is root's, since Python itself may be installed there.
_AS_NOBODY = (
    "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all,+dac_read_search",
    "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search",
)  # fmt: skip


def test_ordinary_user_gets_the_same_report(short_directory: Path) -> None:
    if os.geteuid():
        pytest.skip("every other test runs as an ordinary user")
    line = [*_AS_NOBODY, *command(short_directory, "--json")]
    refused = subprocess.run(line, capture_output=True, text=True, env=environment_of_tests(), timeout=SECONDS)
    assert refused.returncode == 2, refused.stderr
    os.chown(short_directory, 65534, 65534)
    done = subprocess.run(line, capture_output=True, text=True, env=environment_of_tests(), timeout=SECONDS)
    measured = report_in(done, short_directory).measurements
    assert measured.drive.error is None
    assert measured.drive.writes
    assert measured.codecs


def test_relative_path_is_reported_absolutely_and_torch_not_imported_without_a_driver(drive: Path) -> None:
    program = (
        "import sys; from tierstore.tuning.consult import consult\n"
        "consult('.', '/nonexistent', 1.0, as_json=True, config=None, hardware=None)\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, env=environment_of_tests(), timeout=SECONDS, cwd=drive)
    assert msgspec.json.decode(done.stdout, type=Report).measurements.drive.path == str(drive)
    assert has_driver() or done.stderr == "False\n"


# --- endings ----------------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool], what: str) -> None:
    ends_at = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < ends_at, f"never: {what}"
        time.sleep(0.01)  # nobody announces what a file system holds


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
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
    wait_until(lambda: used_bytes(drive) >= before_bytes + 16 * MIB, "it uses the drive")
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


@pytest.mark.slow
@pytest.mark.parametrize("directions", [("read", "write"), ("read",)], ids=["both ways", "reading"])
def test_slow_drive_is_measured_in_time_and_said_to_be_slow(directions: tuple[str, ...], drive: Path) -> None:
    """10 MB/s, by the kernel's own throttle."""
    number = os.stat(drive).st_dev
    with made_cgroup("blkio") as group:
        try:
            for direction in directions:
                file = group / f"blkio.throttle.{direction}_bps_device"
                file.write_text(f"{os.major(number)}:{os.minor(number)} 10000000")
        except OSError as error:
            pytest.skip(f"no throttle here: {error}")
        report = report_in(run_in([group], str(drive), "--seconds", "10", "--json"), drive)
    assert {"drive-very-slow", "partly-measured"} <= codes(report)
    found = {"read": report.measurements.drive.reads, "write": report.measurements.drive.writes}
    for direction in directions:
        assert max(each.bytes_per_second for each in found[direction]) < 20e6
        assert all(each.block_bytes * each.depth <= 32 * MIB for each in found[direction])
    assert not report.is_usable

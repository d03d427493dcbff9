"""The command as a stranger meets it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.command_line import Command, Done, command_of, complaint_of, hear_hangups
from tierstore.demo import DemoResult, DemoSettings, compare
from tierstore.demo.compare import RunReport
from tierstore.rules.counters import Counters
from tierstore.store.stats import StoreStats

SMALL = ("--steps", "2", "--layers", "8", "--width", "64", "--context", "256", "--batch", "16")
"""Saves more in a step than a host budget of 1 MiB and the staging window take, so something has to be written."""


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other on busy cores take ten times as long
    return command_of("demo", monkeypatch, capsys)


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"COLUMNS": "80", "PYTHONPATH": os.pathsep.join(sys.path)} | changes


def in_process_of_its_own(*arguments: str) -> Done:
    line = [sys.executable, "-m", "tierstore.cli", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment())
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def read_only_directory(tmp_path: Path) -> Path:
    """A directory in which this user cannot write."""
    if os.geteuid():
        tmp_path.chmod(0o500)
        return tmp_path
    # root writes anywhere but on a file system that is mounted read-only
    for line in Path("/proc/self/mounts").read_text().splitlines():
        mount_point = Path(line.split(" ")[1])
        if mount_point.is_dir() and os.statvfs(mount_point).f_flag & os.ST_RDONLY:
            return mount_point
    pytest.skip("run by root, who writes anywhere, and nothing is mounted read-only")


def test_help_names_every_option_and_program_its_version_and_commands(demo: Command) -> None:
    done = demo("--help")
    assert done.returncode == 0
    for option in ("--path", "--host-bytes", "--steps", "--device", "--text", "--layers", "--json"):
        assert option in done.stdout
    assert demo("--faster").returncode == 2
    done = in_process_of_its_own("--version")
    assert (done.returncode, done.stdout.partition(" ")[0]) == (0, "tierstore")
    done = in_process_of_its_own("--help")
    assert (done.returncode, "demo" in done.stdout) == (0, True)
    assert in_process_of_its_own("juggle").returncode == 2


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--text", "novel.txt", "no such file or directory"),
        ("--text", ".", "is a directory"),
        ("--text", "empty", "it holds 0 bytes"),
        ("--text", "short", "it holds 9 bytes"),
        ("--host-bytes", "12 parsecs", "8GiB"),
        ("--path", "nvme", "no such directory"),
        ("--path", "short", "not a directory"),
        ("--steps", "0", "1 or more"),
    ],
)
def test_argument_that_cannot_be_used_is_refused_in_one_line(
    option: str, value: str, words: str, demo: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"too short")
    complaint = complaint_of(demo(option, value))
    assert option.removeprefix("--").replace("-", "_") in complaint.replace("-", "_")
    assert words in complaint
    assert {each.name for each in tmp_path.iterdir()} == {"empty", "short"}


def test_path_read_only_refused(demo: Command, read_only_directory: Path) -> None:
    assert "cannot be written to" in complaint_of(demo("--path", read_only_directory))


def test_device_unknown_refused(tmp_path: Path) -> None:
    done = in_process_of_its_own("demo", "--device", "cpu:x", "--path", str(tmp_path))
    (complaint,) = [line for line in done.stderr.splitlines() if line.startswith("tierstore: ")]
    assert (done.returncode, done.stdout) == (2, "")
    assert "--device" in complaint
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_accelerators_that_are_absent_are_refused_before_torch_is_imported() -> None:
    program = (
        "import sys, pathlib, tierstore.base.device_files as files, tierstore.cli\n"
        "files._FOLDER = pathlib.Path('/nonexistent')\n"
        "for device in ('cuda', 'cuda:3', 'xpu', 'mps', 'abacus'):\n"
        "    sys.argv = ['tierstore', 'demo', '--device', device, '--text', '/no/such/file']\n"
        "    try:\n"
        "        tierstore.cli.main()\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 2\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment())
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    complaints = done.stderr.splitlines()
    assert len(complaints) == 5, "it says nothing else"
    assert all("cannot be used" in each and "no driver" in each and "cpu" in each for each in complaints)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_demo_ended_by_a_signal_leaves_no_file_and_no_process(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tierstore.cli", "demo", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment(XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path)),
        preexec_fn=hear_hangups,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        while f"spills to {tmp_path}".encode() not in (line := process.stderr.readline()):
            assert line, "it does not say where"
        process.send_signal(number)
        assert process.wait() != 0
        if number is not signal.SIGKILL:  # nobody could end the training's process then
            process.communicate()  # until nobody holds its output, the helpers of multiprocessing included
            _, living = psutil.wait_procs(_living_in_group(process.pid), timeout=60)
            assert living == []
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def _living_in_group(group: int) -> list[psutil.Process]:
    """The processes of a group that have not ended: multiprocessing's own end a moment after the demo."""
    found = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):  # it has ended since it was listed
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_demo_small_model_keeps_every_bit_and_json_is_all_of_standard_output(demo: Command, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    place = ("--text", file, "--path", tmp_path)
    done = demo(*SMALL, *place, "--device", "cpu", "--host-bytes", "1MiB", "--json")
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stderr
    result = json.loads(done.stdout)
    assert (result["gradients_identical"], result["first_difference"]) == (True, None)
    assert (result["host_bytes"], result["settings"]["steps"]) == (2**20, 2)
    for run in (result["plain"], result["tierstore"]):
        assert run["peak_bytes"] > 0
        assert len(run["step_seconds_each"]) == len(run["loss_each"]) == 2
    assert result["plain"]["loss_each"] == result["tierstore"]["loss_each"]
    stats = result["tierstore"]["stats"]
    assert stats["spilled_bytes"] > 0
    assert stats["restored_bytes"] > 0
    assert list(tmp_path.iterdir()) == [file]


def _believe_in(monkeypatch: pytest.MonkeyPatch, digest_with_store: str) -> None:
    """Has the demo believe in runs that ended with digests; the rest of the command is the real one.

    For the store never makes gradients differ, and nothing else can be told to.
    """
    stats = StoreStats.of(
        Counters(spilled_bytes=3 * 2**30),
        **dict.fromkeys(("live_handles", "device_bytes", "device_limit_bytes", "host_bytes", "host_bytes_peak"), 0),
        **dict.fromkeys(("staging_bytes", "staging_used_bytes", "lent_bytes", "disk_bytes", "disk_bytes_peak"), 0),
        write_allowance_bytes=None,
        open_seconds=1.0,
        io_mode="O_DIRECT",
        host_memory="pageable",
        codec_choices={},
    ).as_dict()

    def run(digest: str) -> RunReport:
        return RunReport("CPU", "2", [1.0], [2.0], [{"loss": "same", "head.bias": digest}], 2**20, None, stats)

    def run_demo(settings: DemoSettings, **options: object) -> DemoResult:
        return DemoResult(settings, 0, run("one"), run(digest_with_store))

    monkeypatch.setattr(compare, "run_demo", run_demo)


def test_demo_gradients_same_prints_table_and_verdict_and_exits_0(
    demo: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    _believe_in(monkeypatch, "one")
    done = demo()
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "gradients bitwise identical: yes"
    for row in ("peak host memory", "step time", "loss at the last step", "spilled", "restored", "prefetch", "stall"):
        assert row in done.stdout
    assert "3.00 GiB" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_demo_gradients_differ_says_no_and_exits_1(demo: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    _believe_in(monkeypatch, "other")
    done = demo()
    assert done.returncode == 1
    said = "gradients bitwise identical: no (first at step 1: the gradient of head.bias)"
    assert " ".join(done.stdout.split()).endswith(said)
    done = demo("--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["first_difference"] == {"step": 1, "name": "head.bias"}


@pytest.fixture
def full_drive(tmp_path: Path) -> Iterator[Path]:
    drive = tmp_path / "drive"
    drive.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(drive)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield drive
    left = os.listdir(drive)
    subprocess.run(["umount", str(drive)], check=True)
    assert left == []


def test_drive_full_one_line_exits_1_and_leaves_nothing(demo: Command, full_drive: Path) -> None:
    model = ("--steps", "1", "--layers", "4", "--width", "128", "--context", "512", "--batch", "16")
    done = demo("--path", full_drive, "--host-bytes", "0", *model)
    assert done.returncode == 1
    (complaint,) = [line for line in done.stderr.splitlines() if line.startswith("tierstore: ")]
    assert "no room for" in complaint
    assert "the data is still in memory" in complaint
    assert "Traceback" not in done.stderr

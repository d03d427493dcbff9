"""The command line as a stranger meets it: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.command_line import hear_hangups
from tierstore import cli
from tierstore.demo import DemoResult, DemoSettings, present
from tierstore.demo.runs import RunReport
from tierstore.rules.counters import Counters
from tierstore.store.stats import StoreStats

SMALL = ("--steps", "2", "--layers", "8", "--width", "64", "--context", "256", "--batch", "16")
"""Saves more in a step than a host budget of 1 MiB and the staging window take, so something has to be written."""


def tierstore(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command; whatever it says is in the result."""
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "tierstore.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment,
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, nothing on standard output, and one line that says what is wrong."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    complaint = [line for line in done.stderr.splitlines() if line.startswith("tierstore: ")]
    assert len(complaint) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in complaint[0]


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


# --- help and usage -----------------------------------------------------------------------------------------------


def test_help_names_every_command() -> None:
    done = tierstore("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout


def test_demo_help_names_every_option() -> None:
    done = tierstore("demo", "--help")
    assert done.returncode == 0
    for option in ("--path", "--host-bytes", "--steps", "--device", "--text", "--layers", "--json"):
        assert option in done.stdout


def test_version_printed() -> None:
    done = tierstore("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("tierstore ")


def test_unknown_command_exit_code_2() -> None:
    assert tierstore("juggle").returncode == 2


def test_unknown_option_exit_code_2() -> None:
    assert tierstore("demo", "--faster").returncode == 2


# --- bad arguments ------------------------------------------------------------------------------------------------


def test_text_missing_refused(tmp_path: Path) -> None:
    assert_refused(tierstore("demo", "--text", str(tmp_path / "novel.txt")), "--text", "no such file or directory")


def test_text_directory_refused(tmp_path: Path) -> None:
    assert_refused(tierstore("demo", "--text", str(tmp_path)), "--text", "is a directory")


@pytest.mark.parametrize("content", [b"", b"too short"])
def test_text_too_short_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    assert_refused(tierstore("demo", "--text", str(file)), "--text", f"it holds {len(content)} bytes")


def test_host_bytes_no_size_refused() -> None:
    assert_refused(tierstore("demo", "--host-bytes", "12 parsecs"), "--host-bytes", "12 parsecs", "8GiB")


def test_path_missing_refused(tmp_path: Path) -> None:
    assert_refused(tierstore("demo", "--path", str(tmp_path / "nvme")), "path", "no such directory")
    assert list(tmp_path.iterdir()) == []


def test_path_file_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert_refused(tierstore("demo", "--path", str(file)), "path", "not a directory")


def test_path_read_only_refused(read_only_directory: Path) -> None:
    assert_refused(tierstore("demo", "--path", str(read_only_directory)), "path", "cannot be written to")


def test_steps_zero_refused() -> None:
    assert_refused(tierstore("demo", "--steps", "0"), "--steps", "1 or more")


def test_device_unknown_refused(tmp_path: Path) -> None:
    assert_refused(tierstore("demo", "--device", "abacus", cwd=tmp_path), "--device", "abacus", "cpu")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "xpu", "mps"])
def test_accelerator_that_is_absent_is_refused_before_torch_is_imported(device: str, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, tierstore.base.device_files as files, tierstore.cli\n"
        "files._FOLDER = pathlib.Path('/nonexistent')\n"
        "sys.argv[0] = 'tierstore'\n"
        "try:\n"
        "    tierstore.cli.main()\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    line = [sys.executable, "-c", program, "demo", "--device", device, "--text", "/no/such/file"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert_refused(done, f"--device='{device}' cannot be used", "no driver", "cpu")
    assert len(done.stderr.splitlines()) == 1, "it says nothing else"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_demo_ended_by_a_signal_leaves_no_file_and_no_process(number: signal.Signals, tmp_path: Path) -> None:
    places = {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "tierstore.cli", "demo", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | places,
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


# --- results ------------------------------------------------------------------------------------------------------


def test_demo_small_model_keeps_every_bit_and_json_is_all_of_standard_output(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    place = ("--text", str(file), "--path", str(tmp_path))
    done = tierstore("demo", *SMALL, *place, "--device", "cpu", "--host-bytes", "1MiB", "--json")
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stderr
    result = json.loads(done.stdout)
    assert result["gradients_identical"] is True
    assert result["first_difference"] is None
    assert result["host_bytes"] == 2**20
    assert result["settings"]["steps"] == 2
    for run in (result["plain"], result["tierstore"]):
        assert run["peak_bytes"] > 0
        assert len(run["step_seconds_each"]) == len(run["loss_each"]) == 2
    assert result["plain"]["loss_each"] == result["tierstore"]["loss_each"]
    stats = result["tierstore"]["stats"]
    assert stats["spilled_bytes"] > 0
    assert stats["restored_bytes"] > 0
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def made_up_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the demo believe in runs that ended with the given digests; the rest of the command is the real one.

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
        return RunReport("CPU", "2", 1, [1.0], [2.0], [{"loss": "same", "head.bias": digest}], 2**20, None, stats)

    def believe(digest_with_store: str) -> None:
        def run_demo(settings: DemoSettings, **options: object) -> DemoResult:
            return DemoResult(settings, 0, run("one"), run(digest_with_store))

        monkeypatch.setattr(present, "run_demo", run_demo)

    return believe


def exit_code_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["tierstore", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_demo_gradients_same_prints_table_and_verdict_and_exits_0(
    made_up_runs: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_runs("one")
    assert exit_code_of(monkeypatch, "demo") == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "gradients bitwise identical: yes"
    for row in ("peak host memory", "step time", "loss at the last step", "spilled", "restored", "prefetch", "stall"):
        assert row in printed
    assert "3.00 GiB" in printed


def test_demo_gradients_differ_says_no_and_exits_1(
    made_up_runs: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_runs("other")
    assert exit_code_of(monkeypatch, "demo") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.endswith("gradients bitwise identical: no (first at step 1: the gradient of head.bias)")


def test_demo_gradients_differ_json_exits_1(
    made_up_runs: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_runs("other")
    assert exit_code_of(monkeypatch, "demo", "--json") == 1
    assert json.loads(capsys.readouterr().out)["first_difference"] == {"step": 1, "name": "head.bias"}


@pytest.fixture
def full_drive(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 8 MiB."""
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


def test_drive_full_one_line_exits_1_and_leaves_nothing(full_drive: Path) -> None:
    model = ("--steps", "1", "--layers", "4", "--width", "128", "--context", "512", "--batch", "16")
    done = tierstore("demo", "--path", str(full_drive), "--host-bytes", "0", *model)
    assert done.returncode == 1
    complaint = [line for line in done.stderr.splitlines() if line.startswith("tierstore: ")]
    assert len(complaint) == 1, done.stderr
    assert "no room for" in complaint[0]
    assert "the data is still in memory" in complaint[0]
    assert "Traceback" not in done.stderr

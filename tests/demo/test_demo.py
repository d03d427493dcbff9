"""The demo as a stranger meets it, and its parts: what compares, what chooses, what is measured."""

import json
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.command_line import Command, command_of, complaint_of, hear_hangups
from tests.processes import python
from tests.waiting import until
from tierstore.demo import DemoResult, DemoSettings, compare, run_demo
from tierstore.demo.compare import first_difference, run_training
from tierstore.demo.memory import PeakHostMemory, resident_bytes
from tierstore.demo.model import ByteTransformer, ModelShape, random_batch
from tierstore.demo.place import file_system_of, store_directory
from tierstore.demo.settings import load_text
from tierstore.demo.training import digest, find_device, prepare
from tierstore.errors import ConfigError, TierStoreError

MIB = 2**20
TINY = DemoSettings(steps=1, layers=1, width=64, context=16, batch=1)
SMALL = DemoSettings(steps=2, layers=8, width=64, context=256, batch=16, device="cpu")
"""Saves more in a step than a host budget of 1 MiB and the staging window take, so something has to be written."""
OPTIONS = ("--steps", "2", "--layers", "8", "--width", "64", "--context", "256", "--batch", "16")
_THREE = [{"loss": "1", "a": "2", "b": "3"}, {"loss": "4", "a": "5", "b": "6"}, {"loss": "7", "a": "8", "b": "9"}]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([dict(step) for step in _THREE], None),
        ([_THREE[0], _THREE[1] | {"b": "changed"}, _THREE[2] | {"a": "changed"}], (2, "b")),
        (_THREE[:2], (3, "loss")),
        ([{"loss": "1", "b": "3"}, *_THREE[1:]], (1, "a")),
    ],
)
def test_first_difference_is_of_the_first_step_or_name_that_differs_or_is_missing(
    other: list[dict[str, str]], expected: tuple[int, str] | None
) -> None:
    assert first_difference(_THREE, other) == first_difference(other, _THREE) == expected


def test_digest_lowest_bit_flipped_differs() -> None:
    tensor = torch.randn(3, 5)
    changed = tensor.clone()
    changed.view(torch.int32)[2, 4] ^= 1
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(changed)
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(tensor.t()) == digest(tensor.t().contiguous())


# --- settings, text, place --------------------------------------------------------------------------------------------


def test_settings_out_of_range_and_text_that_is_too_short_are_refused(tmp_path: Path) -> None:
    for option in ("steps", "layers", "width", "context", "batch"):
        with pytest.raises(ConfigError, match=f"--{option}=0 "):
            DemoSettings(**{option: 0})
    assert len(load_text(None, at_least_bytes=513)) > 100_000
    file = tmp_path / "text"
    file.write_bytes(bytes(17))
    assert load_text(str(file), at_least_bytes=17) == bytes(17)
    with pytest.raises(ConfigError, match="it holds 17 bytes, and one sequence needs 18"):
        load_text(str(file), at_least_bytes=18)


def test_store_directory_is_the_one_given_or_the_first_usual_one_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/dev/shm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store_directory(None) == tmp_path
    monkeypatch.chdir(tmp_path.parent)
    assert store_directory(None) == tmp_path.parent
    assert store_directory("/dev/shm") == Path("/dev/shm")
    (deleted := tmp_path / "deleted").mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    assert store_directory(None) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert file_system_of(Path("/proc/self")) == "proc"
    with pytest.raises(ConfigError, match=r"--device='cpu:x'.*offer: auto, cpu"):
        find_device("cpu:x")


# --- measuring --------------------------------------------------------------------------------------------------------


def test_peak_host_memory_sees_what_is_freed_again() -> None:
    with PeakHostMemory() as host:
        before = resident_bytes()
        taken = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc may have some left
        torch.frombuffer(taken, dtype=torch.uint8).fill_(1)
        while host.added_bytes < 60 * MIB:  # until a sample has seen it; the test's time limit ends it otherwise
            pass
        del taken
        assert resident_bytes() < before + 32 * MIB
    assert 60 * MIB <= host.added_bytes < 100 * MIB


def test_batch_targets_are_the_next_bytes_and_the_model_looks_only_backwards() -> None:
    corpus = torch.arange(100, dtype=torch.uint8)
    tokens, targets = random_batch(corpus, 4, 16, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens + 1, targets)
    torch.manual_seed(0)
    model = ByteTransformer(ModelShape(layers=1, width=64, heads=1, context=16))
    embedded: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    changed = tokens.clone()
    changed[:, -1] += 1
    with torch.no_grad():
        model(tokens, targets)
        model(changed, targets)
    assert torch.equal(embedded[0][:, :-1], embedded[1][:, :-1])
    assert not torch.equal(embedded[0][:, -1], embedded[1][:, -1])


class _Calls(TorchDispatchMode):
    """Which functions were called on a single element, with which dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].numel() == 1:
            self.seen.add((func.overloadpacket.__name__, args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_demo_calls_all_that_pytorch_leaves_to_mkl_by_one_thread_before_it_trains() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h"
    names = re.findall(r"^IMPLEMENT_VML_MKL\((\w+), \w+\)", header.read_text(), re.MULTILINE)
    assert names, "PyTorch's header reads otherwise now"
    with _Calls() as calls:
        prepare(TINY, torch.device("cpu"))
    assert {(name, dtype) for name in names for dtype in (torch.float32, torch.float64)} <= calls.seen


# --- runs in fresh processes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoResult]:
    """A real demo."""
    folder, lines = tmp_path_factory.mktemp("demo"), []
    file = folder / "text"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other on busy cores take ten times as long
        yield run_demo(replace(SMALL, text=str(file)), path=str(folder), host_bytes="1MiB", say=lines.append)
    assert f"The store spills to {folder}" in "\n".join(lines)
    for line in ("plain: on CPU", "plain: step 1 of 2: ", "plain: step 2 of 2: ", "tierstore: step 2 of 2: "):
        assert sum(each.startswith(line) for each in lines) == 1
    assert list(folder.iterdir()) == [file]


def test_demo_keeps_every_bit_and_another_seed_has_others(ran: DemoResult) -> None:
    assert ran.difference is None
    assert ran.plain.losses == ran.stored.losses
    assert set(ran.plain.digests[0]) > {"loss", "head.weight", "blocks.0.mlp.0.bias"}
    assert ran.stored.stats is not None
    assert ran.stored.stats["spilled_bytes"] > 0
    assert ran.stored.stats["restored_bytes"] > 0
    other = run_training("plain", replace(ran.settings, seed=1, steps=1), lambda line: None)
    assert first_difference(ran.plain.digests, other.digests) == (1, "loss")


def test_demo_that_moved_nothing_says_what_shows_more(ran: DemoResult) -> None:
    assert ran.why_nothing_moved() is None
    still = replace(ran, stored=replace(ran.stored, stats={**(ran.stored.stats or {}), "spilled_bytes": 0}))
    assert "nothing to disk" in str(still.why_nothing_moved())


def test_run_that_crashes_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TierStoreError, match=r"^the plain run was ended by SIGABRT$"):
        run_training("plain", TINY, lambda line: None)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return command_of("demo", monkeypatch, capsys)


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"COLUMNS": "80", "PYTHONPATH": os.pathsep.join(sys.path)} | changes


def test_program_has_a_version_without_torch_and_refuses_what_it_does_not_know(demo: Command) -> None:
    program = "import sys, tierstore.cli as cli; sys.argv[1:] = ['--version']; pass\ntry: cli.main()\n"
    program += "finally: assert not {'torch', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stderr, done.stdout.partition(" ")[0]) == (0, "", "tierstore")
    assert demo("--faster").returncode == 2


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
        ("--width", "100", "multiple of 64"),
        ("--seed", str(2**64), "-2**63 to 2**64 - 1"),
        ("--device", "tpu", "offer: auto, cpu"),
        ("--device", "meta", "offer: auto, cpu"),
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


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGINT,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGHUP, signal.SIGKILL)),
    ],
)
def test_demo_ended_by_a_signal_leaves_no_file_and_no_process(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tierstore.cli", "demo", *OPTIONS],
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


def test_ctrl_c_of_a_terminal_as_the_training_process_starts_is_left_to_the_command() -> None:
    """It goes to all processes of the group. The training's does not say so too: its parent ends it."""
    interrupted: list[int] = []

    def interrupt() -> None:
        """As soon as Python listens there, which is before any line of ours."""
        until(lambda: any(map(_is_being_started, psutil.Process().children())))
        (started,) = filter(_is_being_started, psutil.Process().children())
        started.send_signal(signal.SIGINT)
        interrupted.append(started.pid)

    thread = threading.Thread(target=interrupt)
    thread.start()
    report = run_training("plain", TINY, lambda line: None)
    thread.join()
    assert len(interrupted) == len(report.losses) == 1


def _is_being_started(process: psutil.Process) -> bool:
    """Whether it is the training's, whose interpreter listens to Ctrl-C."""
    if not any("spawn_main" in word for word in process.cmdline()):  # multiprocessing has another one
        return False
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (caught,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(caught >> (signal.SIGINT - 1) & 1)


def test_small_budget_of_the_command_s_own_choice_is_no_mistake(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_training("tierstore", TINY, lambda line: None, str(tmp_path), 180_000)
    assert capfd.readouterr().err == ""


def test_demo_without_standard_streams_ends_as_with_them(tmp_path: Path) -> None:
    words = ["demo", "--path", tmp_path, "--steps", 1, "--layers", 1, "--width", 64, "--context", 16, "--batch", 1]
    done = python("-m", "tierstore.cli", *words, before=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"))
    assert done.returncode == 0


def _living_in_group(group: int) -> list[psutil.Process]:
    """The processes of a group that have not ended: multiprocessing's own end a moment after the demo."""
    found = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):  # it has ended since it was listed
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_verdict_and_exit_code_tell_whether_the_gradients_differ(
    ran: DemoResult, demo: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store never makes them differ, so the command is told so."""
    monkeypatch.setattr(compare, "run_demo", lambda *_, **__: ran)
    done = demo()
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "gradients bitwise identical: yes")
    for row in ("peak host memory", "step time", "loss at the last step", "spilled", "restored", "prefetch", "stall"):
        assert row in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    result = json.loads(demo("--json").stdout)
    assert (result["gradients_identical"], result["first_difference"]) == (True, None)
    assert (result["host_bytes"], result["settings"]["steps"]) == (MIB, 2)
    for run in (result["plain"], result["tierstore"]):
        assert run["peak_bytes"] > 0
        assert len(run["step_seconds_each"]) == len(run["loss_each"]) == 2
    changed = [dict(digests) for digests in ran.stored.digests]
    changed[0]["head.bias"] = "other"
    other = replace(ran, stored=replace(ran.stored, digests=changed))
    monkeypatch.setattr(compare, "run_demo", lambda *_, **__: other)
    done = demo()
    said = "gradients bitwise identical: no (first at step 1: the gradient of head.bias)"
    assert (done.returncode, " ".join(done.stdout.split()).endswith(said)) == (1, True)
    done = demo("--json")
    assert (done.returncode, json.loads(done.stdout)["first_difference"]) == (1, {"step": 1, "name": "head.bias"})


def test_progress_on_a_terminal_breaks_between_words(
    ran: DemoResult, demo: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*_: object, say: compare.Say, **__: object) -> DemoResult:
        say("word " * 60)
        return ran

    monkeypatch.setattr(compare, "run_demo", told)
    assert demo().stderr.count("\n") == 1, "one line in a file"
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    assert [line.rstrip()[-4:] for line in demo().stderr.splitlines()] == ["word", "word"]


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


@pytest.mark.slow  # trains without a store first
def test_drive_full_one_line_exits_1_and_leaves_nothing(demo: Command, full_drive: Path) -> None:
    model = ("--steps", "1", "--layers", "4", "--width", "128", "--context", "512", "--batch", "16")
    done = demo("--path", full_drive, "--host-bytes", "0", *model)
    assert done.returncode == 1
    (complaint,) = [line for line in done.stderr.splitlines() if line.startswith("tierstore: ")]
    assert "no room for" in complaint
    assert "the data is still in memory" in complaint
    assert "Traceback" not in done.stderr

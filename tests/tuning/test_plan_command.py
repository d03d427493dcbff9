"""`tierstore plan` on a trace of a real run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import LENGTH, TENSOR_BYTES, Command, command_of, complaint_of, record_two_steps
from tests.daemon.conftest import END_SECONDS, environment_of_tests
from tests.tuning.machines import drive_of_speed
from tests.tuning.machines import machine as measured_machine
from tierstore.hardware import hardware_text
from tierstore.tuning.machines import shipped_machines
from tierstore.tuning.report import hardware_of

_ON_CUDA = b'"device":"cpu"', b'"device":"cuda:0"'


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_two_steps(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_of("plan", monkeypatch, capsys)


@pytest.fixture
def planned(command: Command, recorded: Path) -> Callable[..., dict[str, Any]]:
    """What it says as JSON."""

    def run(*arguments: object) -> dict[str, Any]:
        done = command("--trace", recorded, "--json", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return run


@pytest.fixture
def refused(command: Command) -> Callable[..., str]:
    """What it says is wrong."""
    return lambda *arguments: complaint_of(command(*arguments))


def test_plan_has_a_row_for_each_machine_and_number_of_ranks(command: Command, recorded: Path, tmp_path: Path) -> None:
    described, file = hardware_of(measured_machine(drive=drive_of_speed(1e4, 1e4))), tmp_path / "slow.toml"
    assert described is not None
    file.write_text(hardware_text(described))
    done = command("--trace", recorded, "--hardware=sata", "--hardware", file, "--ranks=1", "--ranks=3")
    assert (done.returncode, done.stderr) == (0, "")
    for machine in ("sata", "slow"):
        assert re.findall(rf"^{machine} +(\d+) ", done.stdout, re.MULTILINE) == ["1", "3"]


def test_plan_without_hardware_is_for_all_that_are_shipped(planned: Callable[..., dict[str, Any]]) -> None:
    answers = planned()["answers"]
    assert [each["machine"] for each in answers] == [each.name for each in shipped_machines()]
    assert all(each["prediction"] and each["costs"] and each["misfit"] is None for each in answers)


def test_plan_as_json_has_the_settings_of_the_trace_and_the_bytes_of_its_step(
    planned: Callable[..., dict[str, Any]], recorded: Path
) -> None:
    result = planned("--hardware=sata", "--ranks=2")
    assert (result["trace"], result["step"]) == (str(recorded), 2)
    assert (result["settings"]["host_bytes"], result["settings"]["codec"]) == (0, "none")
    (answer,) = result["answers"]
    assert answer["num_ranks"] == 2
    moved = answer["prediction"]
    assert 0 < moved["read_bytes"] <= moved["written_bytes"] <= 2 * LENGTH * TENSOR_BYTES


def test_plan_with_other_settings_follows_them(planned: Callable[..., dict[str, Any]]) -> None:
    roomy = planned("--hardware=sata", "--host-bytes=1GiB")["answers"][0]["prediction"]
    assert (roomy["written_bytes"], roomy["limit"]) == (0, "nothing")
    tight = planned("--hardware=sata", "--host-bytes=64KiB")["answers"][0]["prediction"]
    assert 0 < tight["written_bytes"] <= LENGTH * TENSOR_BYTES
    assert tight["host_bytes_peak"] <= 64 * 2**10


def test_machines_that_are_equal_are_one_line(command: Command, recorded: Path) -> None:
    done = command("--trace", recorded, "--host-bytes=1GiB")
    assert done.returncode == 0
    assert re.fullmatch(r"Equal on all of them: [0-9.e-]+ s a step, bound by nothing\.\n", done.stdout)


def test_plan_takes_the_file_that_a_doctor_writes(planned: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    described, file = hardware_of(measured_machine()), tmp_path / "hw.toml"
    assert described is not None
    file.write_text(hardware_text(described))
    (answer,) = planned("--hardware", file)["answers"]
    assert answer["machine"] == "hw"
    assert 0 < answer["prediction"]["written_bytes"] <= LENGTH * TENSOR_BYTES
    assert answer["costs"]["years_to_rating"] is None


def test_machine_of_a_file_with_brackets_in_its_name_is_shown_as_it_is(
    command: Command, recorded: Path, tmp_path: Path
) -> None:
    described, file = hardware_of(measured_machine()), tmp_path / "[bold]mine.toml"
    assert described is not None
    file.write_text(hardware_text(described))
    done = command("--trace", recorded, "--hardware", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[bold]mine " in done.stdout


def test_tier_that_is_too_small_is_an_answer(
    command: Command, planned: Callable[..., dict[str, Any]], recorded: Path, tmp_path: Path
) -> None:
    described, file = hardware_of(measured_machine(drive={"free_bytes": 16 * 2**10})), tmp_path / "hw.toml"
    assert described is not None
    file.write_text(hardware_text(described))
    options = ("--hardware", file, "--staging-bytes=16KiB")
    done = command("--trace", recorded, *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"does not fit: +needs \d+ KiB of disk, has 16 KiB", done.stdout)
    (answer,) = planned(*options)["answers"]
    assert (answer["prediction"], answer["costs"]) == (None, None)
    assert (answer["misfit"]["tier"], answer["misfit"]["available_bytes"]) == ("disk", 16 * 2**10)
    assert TENSOR_BYTES <= answer["misfit"]["needed_bytes"] <= LENGTH * TENSOR_BYTES


def test_list_names_every_machine_and_needs_no_trace(command: Command) -> None:
    done = command("--list-hardware")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == [each.name for each in shipped_machines()]


def test_list_as_json_names_them_too(command: Command) -> None:
    machines = json.loads(command("--list-hardware", "--json").stdout)["machines"]
    assert [each["name"] for each in machines] == [each.name for each in shipped_machines()]
    assert all(each["title"] for each in machines)


def test_trace_that_cannot_be_planned_is_one_line_and_exit_code_2(
    refused: Callable[..., str], recorded: Path, tmp_path: Path
) -> None:
    lines = recorded.read_bytes().splitlines(keepends=True)
    file = tmp_path / "trace.jsonl"
    assert "--trace" in refused()
    assert "cannot be read" in refused("--trace", file)
    assert "cannot be read" in refused("--trace", tmp_path)
    for content, words in (
        (b"".join([*lines[:5], b"{}\n", *lines[5:]]), "line 6 "),
        (b"", "line 1 "),
        (lines[0], "no step"),
        (b"".join(line for line in lines if b'"gone"' not in line), "no step"),
        (b'"device":"cuda:1"'.join(b"".join(lines).rsplit(_ON_CUDA[0], 1)).replace(*_ON_CUDA), "one accelerator"),
    ):
        file.write_bytes(content)
        assert words in refused("--trace", file)


def test_trace_of_an_accelerator_is_planned_on_machines_that_have_one(
    command: Command, refused: Callable[..., str], recorded: Path, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(recorded.read_bytes().replace(*_ON_CUDA))
    done = command("--trace", file)
    assert (done.returncode, done.stderr) == (0, "")
    having = {each.name for each in shipped_machines() if each.hardware.accelerators}
    assert {each["machine"] for each in json.loads(command("--trace", file, "--json").stdout)["answers"]} == having
    assert "CUDA_LAUNCH_BLOCKING" in done.stdout
    assert "its file has none" in refused("--trace", file, "--hardware=cloud-l32s-v3")


def test_trace_whose_launches_block_is_planned_without_a_warning(
    command: Command, recorded: Path, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    blocking = b'"launches_block":false', b'"launches_block":true'
    file.write_bytes(recorded.read_bytes().replace(*_ON_CUDA).replace(*blocking))
    done = command("--trace", file, "--hardware=sata", "--device-bytes=1MiB", "--json")
    (answer,) = json.loads(done.stdout)["answers"]
    assert json.loads(done.stdout)["warnings"] == []
    assert answer["prediction"]["offloaded_bytes"] == 0
    assert answer["prediction"]["device_bytes_peak"] == LENGTH * TENSOR_BYTES


def test_hardware_or_settings_that_cannot_be_read_are_one_line_and_exit_code_2(
    refused: Callable[..., str], recorded: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file.toml"
    file.write_text("[drive")
    asked = ("--trace", recorded)
    assert "it is not valid TOML" in refused(*asked, "--hardware", file)
    assert "it is none of cloud-l32s-v3" in refused(*asked, "--hardware", "unheard-of")
    assert "No such file" in refused(*asked, "--hardware", tmp_path / "missing.toml")
    assert "host_bytes='much'" in refused(*asked, "--host-bytes", "much")
    assert "it has figures of bits" in refused(*asked, "--codec", "zstd:9")


@pytest.mark.parametrize("arguments", [["--ranks=0"], ["--ranks=x"], ["--unknown"]])
def test_option_that_is_wrong_is_exit_code_2(command: Command, recorded: Path, arguments: list[str]) -> None:
    done = command("--trace", recorded, *arguments)
    assert (done.returncode, done.stdout) == (2, "")


def test_help_names_the_options(command: Command) -> None:
    done = command("--help")
    assert done.returncode == 0
    assert all(f"--{name}" in done.stdout for name in ("trace", "hardware", "ranks", "host-bytes", "json"))


def test_plan_that_cannot_be_written_is_one_line_and_code_1(recorded: Path) -> None:
    line = [sys.executable, "-m", "tierstore.cli", "plan", f"--trace={recorded}", "--hardware=sata"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            line, stdout=full, stderr=subprocess.PIPE, text=True, env=environment_of_tests(), timeout=END_SECONDS
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "standard output cannot be written" in done.stderr


def test_plan_into_a_closed_pipe_says_nothing(recorded: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "tierstore.cli", "plan", f"--trace={recorded}", "--hardware=sata", "--json"]
    try:
        done = subprocess.run(
            line, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment_of_tests(), timeout=END_SECONDS
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_plan_imports_no_torch_and_leaves_no_file(recorded: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from tierstore import cli\n"
        f"sys.argv = ['tierstore', 'plan', '--trace', {str(recorded)!r}]\n"
        "try: cli.main()\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment_of_tests(), cwd=tmp_path,
        timeout=END_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "False\n")
    assert list(tmp_path.iterdir()) == []

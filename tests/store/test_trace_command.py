"""`tierstore trace` on a file of a real run: what it writes, prints and refuses."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import LENGTH, TENSOR_BYTES, Command, command_of, complaint_of, record_two_steps
from tests.processes import output_of


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_two_steps(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_of("trace", monkeypatch, capsys)


@pytest.fixture
def refused(command: Command) -> Callable[..., str]:
    """What it says is wrong."""
    return lambda *arguments: complaint_of(command(*arguments))


def test_view_writes_what_is_asked_for_and_says_why_it_is_slow(
    command: Command, recorded: Path, tmp_path: Path
) -> None:
    html, perfetto = tmp_path / "step.html", tmp_path / "step.json"
    done = command("view", str(recorded), f"--html={html}", f"--perfetto={perfetto}")
    assert done.returncode == 0, done.stderr
    assert [line.startswith("wrote ") for line in done.stdout.splitlines()] == [True, True, False]
    assert "of 2" in done.stdout.splitlines()[-1]
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    slices = [event for event in json.loads(perfetto.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {"step 1", "step 2", "forward", "backward", "write", "read"} <= {event["name"] for event in slices}


def test_view_json_names_the_files_and_has_the_figures_of_the_step(
    command: Command, recorded: Path, tmp_path: Path
) -> None:
    html = tmp_path / "step.html"
    done = command("view", recorded, f"--html={html}", "--step=2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["wrote"], result["num_steps"]) == ({"html": str(html)}, 2)
    assert (result["step"]["number"], result["step"]["num_packed"]) == (2, LENGTH)
    assert html.exists()


def test_view_without_outputs_writes_a_page_beside_the_file(command: Command, recorded: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes(recorded.read_bytes())
    done = command("view", str(file), "--step", "2")
    assert done.returncode == 0, done.stderr
    assert "Step 2 of 2" in (tmp_path / "mine.html").read_text(encoding="utf-8")


def test_view_never_writes_over_the_trace(refused: Callable[..., str], recorded: Path, tmp_path: Path) -> None:
    file, link = tmp_path / "mine.html", tmp_path / "link.jsonl"
    file.write_bytes(recorded.read_bytes())
    link.symlink_to(file)
    for option in ("--html", "--perfetto"):
        assert "the trace is this file" in refused("view", str(link), f"{option}={file}")
    assert "the trace is this file" in refused("view", str(file))
    assert "--html is this file" in refused("view", str(recorded), f"--html={tmp_path}/o", f"--perfetto={tmp_path}/./o")
    assert file.read_bytes() == recorded.read_bytes()
    assert {each.name for each in tmp_path.iterdir()} == {"mine.html", "link.jsonl"}


def test_show_has_the_figures_of_every_step(command: Command, recorded: Path) -> None:
    done = command("show", str(recorded), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["is_complete"] is True
    assert [step["number"] for step in result["steps"]] == [1, 2]
    assert [step["num_packed"] for step in result["steps"]] == [LENGTH, LENGTH]
    assert all(step["written"]["nbytes"] == step["read"]["nbytes"] == LENGTH * TENSOR_BYTES for step in result["steps"])
    assert all(step["headline"] for step in result["steps"])
    done = command("show", str(recorded))
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["step", "1", "2"]


def test_bad_file_or_step_is_one_line_and_exit_code_2(
    refused: Callable[..., str], recorded: Path, tmp_path: Path
) -> None:
    lines = recorded.read_bytes().splitlines(keepends=True)
    (tmp_path / "touched").touch()
    (tmp_path / "other").write_text("step 1 took a second\n")
    (tmp_path / "damaged").write_bytes(b"".join([*lines[:5], b"{}\n", *lines[5:]]))
    (tmp_path / "empty").write_bytes(lines[0])
    for what in ("view", "show"):
        assert "line 6 " in refused(what, tmp_path / "damaged")
        assert "no step" in refused(what, tmp_path / "empty")
        assert "it is empty" in refused(what, tmp_path / "touched")
        assert "it is no trace" in refused(what, tmp_path / "other")
        assert "cannot be read" in refused(what, tmp_path / "missing")
        assert "cannot be read" in refused(what, os.sep)
        assert "steps 1 to 2" in refused(what, recorded, "--step", 3)
    for option in ("--html", "--perfetto"):
        assert option in refused("view", recorded, option, tmp_path / "missing" / f"out.{option[2:]}")
        other = "--perfetto" if option == "--html" else "--html"
        assert option in refused("view", recorded, option, tmp_path, other, tmp_path / "other output")
    assert not (tmp_path / "other output").exists(), "none is written where one cannot be"


def test_view_imports_no_torch(recorded: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from tierstore.commands.trace import view; from pathlib import Path; "
        f"view(Path({str(recorded)!r}), html=Path({str(tmp_path / 'out.html')!r})); sys.exit('torch' in sys.modules)"
    )
    output_of(program)

"""The program and the commands of README.md run as they stand there, and print what they promise."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.training_step import HOST_BYTES
from bench.trainings import readme_training
from tests.docs.pages import ROOT, blocks_of, commands_of
from tests.docs.test_tutorial import install_quickly

SMALL = " --device=cpu --steps=2 --layers=2 --width=64 --context=128 --batch=4"


def program() -> str:
    """The first example of the page."""
    return re.findall(
        r"^```python\n(.+?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )[0]


def test_ten_lines_are_ten() -> None:
    lines = [line for line in program().splitlines() if line.strip()]
    assert len(lines) - sum(line.startswith(("import", "from")) for line in lines) <= 10


def test_ten_lines_print_what_was_stored_and_the_peak(store_directory: Path) -> None:
    small = program().replace("(16, 512, 256)", "(4, 512, 256)").replace("128MiB", "8MiB")
    assert small.count("(4, 512, 256)") == small.count("8MiB") == 1
    done = subprocess.run(
        [sys.executable, "-c", small], cwd=store_directory, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"(?m)^peak: \d+ MiB$", done.stdout)
    assert re.search(r"written to disk", done.stdout.splitlines()[0])
    assert list(store_directory.iterdir()) == [], "a folder of its own, which goes"


def test_ten_lines_are_the_workload_of_the_table_and_of_the_picture() -> None:
    """Their model, batch and loss are those that `training_step` and `step_memory` measure."""
    measured = inspect.getsource(readme_training).replace("nn.", "torch.nn.")
    lines = [line.strip() for line in program().splitlines()]
    for begin in ("options = ", "layers = ", "model, batch = "):
        (line,) = [line for line in lines if line.startswith(begin)]
        assert line in measured
    assert "model(batch).square().mean()" in measured
    assert 'host_bytes="128MiB"' in program()
    assert HOST_BYTES == 128 * 2**20


@pytest.mark.slow
def test_five_commands_install_and_show_it(tmp_path: Path) -> None:
    """But for the two that ask a package index: `python -m tests.release` installs a release."""
    (console,) = [block for block in blocks_of(ROOT / "README.md") if block.language == "console"]
    typed = [command.partition("  #")[0].strip() for command, _ in commands_of(console.code)]
    clone, environment, torch, install, demo = typed
    assert torch.startswith("pip install torch --index-url https://")
    assert (install, demo) == ("pip install .", "tierstore demo")
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("there is no repository to clone")

    def types(folder: Path, *lines: str) -> None:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=folder, env=variables, check=True, timeout=120)

    types(tmp_path, clone.replace("ADDRESS", str(ROOT)), environment.replace("-m venv", "-m venv --without-pip"))
    source = tmp_path / "tierstore"
    install_quickly(source / ".venv", source)
    types(source, environment.partition(" && ")[2], demo + SMALL)

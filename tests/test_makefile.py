"""What `make` says and would run. Nothing is installed here."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def _make(*arguments: str, active: Path | None = None) -> str:
    """What it says, with an `active` virtual environment or none."""
    left_out = ("MAKE", "MFLAGS", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environment |= {} if active is None else {"VIRTUAL_ENV": str(active)}
    made = subprocess.run(["make", *arguments], cwd=_ROOT, env=environment, capture_output=True, text=True, check=True)
    return made.stdout


def _dry_run(target: str) -> str:
    """What it would run in a fresh clone."""
    return _make("--dry-run", "--what-if=pyproject.toml", target)


def test_help_lists_every_target_and_is_the_default() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (_ROOT / "Makefile").read_text(), re.MULTILINE)
    text = _make("help")
    assert [line.split()[1] for line in text.splitlines()] == phony.split()
    assert all(len(line.split()) > 3 for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= 80
    assert _make() == text


def test_demo_installs_only_what_the_package_runs_with() -> None:
    commands = _dry_run("demo")
    assert "pip install --disable-pip-version-check -c .venv/tierstore-constraints.txt -e .\n" in commands
    assert "[" not in commands, "no extra"
    assert "tierstore demo" in commands


def test_tests_and_checks_install_both_and_say_what_it_takes() -> None:
    dry = {target: _dry_run(target) for target in ("test", "check", "docs")}
    for target, commands in dry.items():
        runtime, dev = (commands.index(each) for each in ("-e .\n", "-e '.[dev,trainers,docs]'"))
        assert runtime < dev
        said = re.findall(r"^echo \"(.+)\"", commands, re.MULTILINE)
        assert all("GB" in each and "minute" in each for each in said[:2])
        assert len(said) == 2 + (target == "test")
        assert all("minute" in each for each in said)
    built = [line for line in dry["docs"].splitlines() if "sphinx" in line]
    assert "--fail-on-warning" in "".join(built)
    assert set(built) <= set(dry["check"].splitlines())


def test_active_environment_is_used_and_its_torch_stays(tmp_path: Path) -> None:
    """In place of the pinned one, which is what an environment without torch gets."""
    pinned = (_ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = {}
    for name in ("with", "without"):
        active = tmp_path / name
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", active], check=True)
        if name == "with":
            (packages,) = active.glob("lib/python*/site-packages")
            (packages / "torch-9.8+cpu.dist-info").mkdir()
            (packages / "torch-9.8+cpu.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.8+cpu\n")
        constraints = active / "tierstore-constraints.txt"
        _make(str(constraints), active=active)
        wanted[name] = constraints.read_text(encoding="utf-8").splitlines()
        commands = _make("--dry-run", "--what-if=pyproject.toml", "test", active=active)
        assert f"{active}/bin/python -m pytest" in commands
        assert ".venv" not in commands
    assert sorted(wanted["without"]) == sorted(pinned)
    (torch,) = [line for line in pinned if line.startswith("torch==")]
    assert sorted(wanted["with"]) == sorted([*(line for line in pinned if line != torch), "torch==9.8+cpu"])


def test_python_that_is_too_old_is_told_before_anything_is_made(tmp_path: Path) -> None:
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(_ROOT / file, tmp_path)
    old = tmp_path / "python3.10"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} "$1" "import sys; sys.version_info = (3, 10, 12); $2"\n')
    old.chmod(0o755)
    before = sorted(tmp_path.iterdir())
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    made = subprocess.run(
        ["make", "demo", f"PYTHON={old}"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert made.returncode != 0
    assert "Python 3.10 is too old: tierstore needs 3.11 or newer" in made.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_time_of_the_suite_is_told_alike_everywhere() -> None:
    told = {
        page: re.findall(r"(?m)^(?:test:|\t@echo \"The tests|\$ make test\b).*?(\d+(?: to \d+)?) minutes", text)
        for page in ("Makefile", "CONTRIBUTING.md", "README.md")
        if (text := (_ROOT / page).read_text(encoding="utf-8"))
    }
    assert all(told.values()), told
    assert len({each for found in told.values() for each in found}) == 1, told

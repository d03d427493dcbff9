"""`python -m tests.release`: build the release, install it into empty environments, and try it.

Wheel and sdist go to `dist/`. `twine check --strict` reads their page. Each is installed by pip into a new environment,
with what `constraints.txt` pins; there `tierstore --version` and a short demo run. In the unpacked sdist all tests are
collected, and some run. It needs a package index, and some gigabytes for PyTorch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

import tierstore

from .artefacts import ROOT, Release, build, unpack

_DEMO = ("demo", "--json", "--device=cpu", "--steps=2", "--layers=4", "--width=128", "--context=256", "--batch=8")
"""Saves eight times what the store may hold, so most of it goes to the drive."""
_TESTS = ("tests/tuning/test_findings.py", "tests/hooks/test_gradients.py", "tests/bench/test_goals.py")
"""What runs in the unpacked sdist; all others are only collected there."""

_console = Console(soft_wrap=True)


def main(
    target: Annotated[Path, typer.Option(help="Where wheel and sdist go.")] = ROOT / "dist",
    install: Annotated[bool, typer.Option(help="Install both and try them. --no-install: only build and test.")] = True,
) -> None:
    """Build and try a release. The exit code is 1 if anything failed."""
    target.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="tierstore-release-") as folder:
        scratch = Path(folder)
        try:
            release = build(target, scratch)
            _console.print(f"built {release.sdist.name} and {release.wheel.name} in {target}")
            if install:
                _check_page(release, scratch / "twine")
            _test_sdist(unpack(release.sdist, scratch / "tested"))
            for package in release if install else ():
                _try(package, scratch / package.suffix.removeprefix("."))
        except subprocess.CalledProcessError as error:
            _console.print(f"failed: {' '.join(map(str, error.cmd))}", style="red", markup=False)
            _console.print(error.stderr or error.stdout or "", markup=False, highlight=False)
            raise typer.Exit(1) from error


def _check_page(release: Release, folder: Path) -> None:
    """Ask the program that uploads whether an index can show the page."""
    pip = _new_environment(folder)
    _run([*pip, "twine"], cwd=folder)
    _run([folder / "bin" / "twine", "check", "--strict", *release], cwd=folder)
    _console.print("twine check --strict: an index can show the page")


def _test_sdist(tree: Path) -> None:
    """Collect all tests of an unpacked sdist, and run some, with the sdist's own package."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    _run([*pytest, "--collect-only"], cwd=tree, environment=environment)
    _run([*pytest, *_TESTS], cwd=tree, environment=environment)
    _console.print("the sdist's tests are all there, and some have run")


def _try(package: Path, folder: Path) -> None:
    """Install into a new environment; ask for the version, and train for two steps."""
    pip = _new_environment(folder)
    _run([*pip, "--constraint", ROOT / "constraints.txt", package], cwd=folder)
    version = _run([folder / "bin" / "tierstore", "--version"], cwd=folder).strip()
    if version != f"tierstore {tierstore.__version__}":
        raise subprocess.CalledProcessError(1, [package.name, "--version"], output=version)
    shown = _run([folder / "bin" / "tierstore", *_DEMO], cwd=folder)
    spilled_bytes = json.loads(shown)["tierstore"]["stats"]["spilled_bytes"]
    if not spilled_bytes:
        raise subprocess.CalledProcessError(1, [package.name, *_DEMO], output="the store wrote nothing to disk")
    told = f"the demo wrote {spilled_bytes / 2**20:.0f} MiB to disk, and its gradients are the same"
    _console.print(f"{package.name}: installed, {version}, {told}")


def _new_environment(folder: Path) -> list[object]:
    """The words that install into it."""
    _run([sys.executable, "-m", "venv", folder], cwd=ROOT)
    return [folder / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]


def _run(command: Sequence[object], cwd: Path, environment: dict[str, str] | None = None) -> str:
    """Its standard output. Raises CalledProcessError: it failed."""
    if environment is None:
        environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    typer.run(main)

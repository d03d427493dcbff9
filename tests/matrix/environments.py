"""Virtual environments for the rows of the matrix: interpreters that are found, and what pip installs for them.

CUDA wheels of torch bring some three gigabytes of NVIDIA's libraries, the same for each Python. They are installed once
into a folder that the environments link to.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["NotAvailableError", "Workshop", "find_python", "requirement_of"]

ROOT = Path(__file__).parents[2]
_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
_SHARED = "nvidia-"
_TIME_LIMIT_SECONDS = 1800.0


class NotAvailableError(Exception):
    """A row cannot be run here; its text says why."""


class Wheel(NamedTuple):
    """One distribution that pip has chosen."""

    name: str
    version: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


def find_python(wanted: str) -> Path:
    """The interpreter of a version such as "3.13", or at a path. Raises NotAvailableError: none is found."""
    if "/" in wanted:
        candidates = [wanted]
    else:
        installed = sorted(Path.home().glob(f".pyenv/versions/{wanted}.*/bin/python{wanted}"), reverse=True)
        candidates = [found for found in (shutil.which(f"python{wanted}"),) if found] + [
            str(file) for file in installed
        ]
    for candidate in candidates:
        question = [candidate, "-c", "import sys; print(sys.executable)"]
        try:  # a name on the path may be one that pyenv refuses to run
            done = subprocess.run(question, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return Path(done.stdout.strip())
    raise NotAvailableError(
        f"no interpreter python{wanted} is found" if "/" not in wanted else f"{wanted} cannot be run"
    )


def requirement_of(torch: str) -> str:
    """For pip, of "oldest" (the first that pyproject.toml allows), "newest", or a version."""
    if torch == "newest":
        return "torch"
    if torch != "oldest":
        return f"torch=={torch}"
    for requirement in _project()["dependencies"]:
        if match := re.fullmatch(r"torch>=([\d.]+)", requirement):
            return f"torch=={match[1]}.*"
    raise LookupError("pyproject.toml does not say which torch is the oldest")


def _project() -> dict[str, list[str]]:
    project: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


@dataclass
class Workshop:
    """Makes environments in a folder, and keeps them for the next run.

    Attributes:
        folder: for all of them.
    """

    folder: Path

    def environment(self, name: str, python: Path, torch: str) -> Path:
        """The interpreter of an environment with torch, tierstore and what the tests need. Blocks for minutes.

        Args:
            name: of the environment.
            python: whose environment.
            torch: as `requirement_of` takes it.

        Raises:
            NotAvailableError: pip cannot install it, in its own words.
        """
        home = self.folder / name
        inside = home / "bin" / "python"
        self._make_pip()
        if not inside.exists():
            _run([str(python), "-m", "venv", "--without-pip", "--clear", str(home)])
        wheels = self._resolve(inside, requirement_of(torch))
        installed, wanted = home / "installed.txt", "\n".join(sorted(wheel.requirement for wheel in wheels))
        if not installed.exists() or installed.read_text(encoding="utf-8") != wanted:
            _run([str(python), "-m", "venv", "--without-pip", "--clear", str(home)])
            shared = [wheel for wheel in wheels if wheel.name.startswith(_SHARED)]
            self._install(inside, [wheel.requirement for wheel in wheels if wheel not in shared])
            if shared:
                self._link(inside, self._shared_folder(inside, shared))
            installed.write_text(wanted, encoding="utf-8")
        self._install(inside, ["--editable", str(ROOT)])
        return inside

    def _make_pip(self) -> None:
        """A pip of today, which every Python runs: that of this environment may know no newer ones."""
        if not (self.folder / "pip" / "pip").exists():
            _run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(self.folder / "pip"), "pip"])

    def _pip(self, inside: Path, *arguments: str) -> None:
        command = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        _run(command, PYTHONPATH=str(self.folder / "pip"))

    def _install(self, inside: Path, what: Sequence[str], *options: str) -> None:
        self._pip(inside, "--no-deps", *options, *what)

    def _resolve(self, inside: Path, torch: str) -> list[Wheel]:
        """What pip would install."""
        constraints, report = self.folder / "constraints.txt", inside.parents[1] / "report.json"
        pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        constraints.write_text("".join(line for line in pinned if not line.startswith("torch==")), encoding="utf-8")
        others = [each for each in _project()["dependencies"] if not each.startswith("torch>")]
        options = ("--dry-run", "--ignore-installed", "--report", str(report), "--constraint", str(constraints))
        self._pip(inside, *options, torch, *others, *_TOOLS)
        chosen = json.loads(report.read_text(encoding="utf-8"))["install"]
        return [Wheel(each["metadata"]["name"].lower(), each["metadata"]["version"]) for each in chosen]

    def _shared_folder(self, inside: Path, wheels: Iterable[Wheel]) -> Path:
        requirements = sorted(wheel.requirement for wheel in wheels)
        folder = self.folder / f"cuda-{hashlib.sha256(' '.join(requirements).encode()).hexdigest()[:12]}"
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            self._install(inside, requirements, "--target", str(unfinished))
            unfinished.rename(folder)
        return folder

    def _link(self, inside: Path, shared: Path) -> None:
        (packages,) = inside.parents[1].glob("lib/python3.*/site-packages")
        for entry in shared.iterdir():
            if not (packages / entry.name).exists():
                os.symlink(entry, packages / entry.name)


def _run(command: Sequence[str], **variables: str) -> None:
    """Raises NotAvailableError, with the command's last words."""
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_TIME_LIMIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAvailableError(str(error)) from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise NotAvailableError(errors[-1] if errors else f"{command[0]} ended with {done.returncode}")

"""Builds a release: an sdist from a copy of the repository, and a wheel from the unpacked sdist."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Release", "build", "files_of_repository", "unpack"]

ROOT = Path(__file__).parents[2]
_NOT_OURS = (".*", "build", "dist", "__pycache__", "*.egg-info", "*.pyc", "fuzz-findings")
_OURS = (".ci", ".github", ".dockerignore", ".gitignore")
_BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


class Release(NamedTuple):
    """What is uploaded.

    Attributes:
        sdist: the archive of the sources.
        wheel: the package, built from the unpacked sdist.
    """

    sdist: Path
    wheel: Path


def files_of_repository() -> list[Path]:
    """Every file and link, below `ROOT`: those that git tracks; where there is no clone, all that no tool has made."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            tracked = (Path(name) for name in listed.stdout.split("\0") if name)
            return [path for path in tracked if os.path.lexists(ROOT / path)]
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*") if not path.is_dir() and _is_ours(path))


def _is_ours(path: Path) -> bool:
    parts = [Path(part) for part in path.relative_to(ROOT).parts if part not in _OURS]
    return not any(part.match(pattern) for part in parts for pattern in _NOT_OURS)


def build(target: Path, scratch: Path, address: str | None = None) -> Release:
    """Build both into `target`.

    Args:
        target: an existing folder.
        scratch: an empty folder, for copies.
        address: of the repository, in place of the one in `pyproject.toml`.

    Raises:
        subprocess.CalledProcessError: setuptools refused; its words are in `stderr`.
    """
    tree = scratch / "tree"
    for path in files_of_repository():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tree / path, follow_symlinks=False)
    if address is not None:
        project = (tree / "pyproject.toml").read_text(encoding="utf-8")
        named = re.sub('(?m)^address = ".*?"', f'address = "{address}"', project)
        (tree / "pyproject.toml").write_text(named, encoding="utf-8")
    sdist = target / _build("sdist", tree, target)
    return Release(sdist, target / _build("wheel", unpack(sdist, scratch / "unpacked"), target))


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack into a folder; returns the only folder in there."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4: Debian 12 has an older one
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    (top,) = folder.iterdir()
    return top


def _build(kind: str, tree: Path, target: Path) -> str:
    """The name of the file that the build backend has made. It runs in a process of its own, without our PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", _BUILD, kind, str(target.resolve())]
    built = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return built.stdout.splitlines()[-1]

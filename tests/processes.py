"""Programs in processes of their own."""

import subprocess
import sys
from pathlib import Path

from tests.daemon.conftest import environment_of_tests

__all__ = ["output_of", "python"]

_SECONDS = 120.0


def python(
    *words: object, before: tuple[str, ...] = (), cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """How Python ends that is called with these words. `before`: those in front of the interpreter's."""
    command = [*before, sys.executable, *map(str, words)]
    env = environment_of_tests(**variables)
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env, timeout=_SECONDS)


def output_of(program: str, *arguments: object, before: tuple[str, ...] = (), **variables: str) -> str:
    """What a program in Python prints, which ends well."""
    done = python("-c", program, *arguments, before=before, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout

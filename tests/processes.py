"""Programs in processes of their own."""

import subprocess
import sys

from tests.daemon.conftest import environment_of_tests

__all__ = ["output_of"]

_SECONDS = 120.0


def output_of(program: str, *arguments: object, before: tuple[str, ...] = (), **variables: str) -> str:
    """What a program in Python prints, which ends well. `before`: the words in front of the interpreter's."""
    command = [*before, sys.executable, "-c", program, *map(str, arguments)]
    env = environment_of_tests(**variables)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout

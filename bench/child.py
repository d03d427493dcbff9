"""A function in a fresh process: `python -m bench.child MODULE FUNCTION ARGUMENTS` ends with its answer as JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

_PATH = "a path"
_DEATH_SECONDS = 5
"""How long a process that was killed is waited for: one that a driver holds may take longer to be gone."""


def command(module: str, function: str, *arguments: object) -> list[str]:
    given = json.dumps(arguments, default=lambda path: {_PATH: str(path)})
    return [sys.executable, "-m", "bench.child", module, function, given]


def call(words: list[str], limit_seconds: float, *, capture: bool) -> subprocess.CompletedProcess[str] | None:
    """Run it in a session of its own; None: it did not end in time, and was killed with all that it started."""
    pipe = subprocess.PIPE if capture else None
    process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=limit_seconds)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_DEATH_SECONDS)
        return None
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def answer_of(words: list[str], limit_seconds: float) -> tuple[Any, str | None]:
    done = call(words, limit_seconds, capture=True)
    if done is None:
        return None, f"not done within {limit_seconds:.3g} s"
    if done.returncode:
        last_words = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        return None, f"exit code {done.returncode}: {last_words[0]}"
    return json.loads(done.stdout.splitlines()[-1]), None


@contextmanager
def conversation(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process that answers each line with one; it ends when the block does, as its input is closed then."""
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.communicate()  # one that was killed before it read its last line is no error


def serve(do: Callable[[str], dict[str, float]]) -> None:
    """In such a process: carry out each line of standard input, until there are no more."""
    for line in sys.stdin:
        print(json.dumps(do(line.strip())), flush=True)


if __name__ == "__main__":
    _, module, function, given = sys.argv
    arguments = json.loads(given, object_hook=lambda each: Path(each[_PATH]) if _PATH in each else each)
    found = getattr(import_module(module), function)(*arguments)
    if found is not None:
        print(json.dumps(found))

"""Programs in processes of their own, each forked from one that has imported PyTorch: that takes seconds."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["Done", "Forked", "forking"]

_LOOP = """
import json, os, sys
for line in sys.stdin:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        program, files, variables = json.loads(line)
        globals().update(variables)
        for descriptor, file in enumerate(files):
            os.dup2(os.open(file, os.O_RDWR), descriptor)
        os.closerange(3, 100)
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
exec(program)
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Forked = Callable[..., Done]


@contextmanager
def forking(
    preamble: str, folder: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[Forked]:
    """Runs programs, after `preamble`, which runs once. Keywords are global variables of the program. `options`: of
    the interpreter; `sys.argv[1]` is the folder, where their outputs lie meanwhile."""
    files = [os.devnull, *(str(folder / name) for name in ("output", "errors"))]
    command = [sys.executable, *options, "-c", preamble + _LOOP, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def run(program: str, **variables: object) -> Done:
            for file in files[1:]:
                Path(file).write_text("")
            print(json.dumps([program, files, variables]), file=stdin, flush=True)
            child = int(stdout.readline())
            try:
                code = int(stdout.readline())
            except BaseException:  # the test's time limit
                os.kill(child, signal.SIGKILL)
                stdout.readline()
                raise
            return Done(code, *(Path(file).read_text() for file in files[1:]))

        yield run
        stdin.close()

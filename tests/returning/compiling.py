"""Programs in C that are tests, or parts of tests, of the caching allocator."""

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["NATIVE", "SANITIZED", "compiled"]

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
SANITIZED = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-function", "-Werror")


def compiled(folder: Path, name: str, *flags: str) -> Path:
    """The program of `name`.c, in `folder`. Skips the test where there is no compiler, or no sanitizer."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    program = folder / name
    if program.exists():
        return program
    command = [compiler, *_WARNINGS, *flags, f"-I{NATIVE}", "-o", program, HERE / f"{name}.c", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if any(flag.startswith("-fsanitize") for flag in flags) and "cannot find" in done.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert done.returncode == 0, done.stderr
    return program

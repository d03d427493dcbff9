"""The program of README.md runs as it stands there, and prints what it promises."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def program() -> str:
    """The first example of the page."""
    return re.findall(
        r"^```python\n(.+?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )[0]


def test_ten_lines_are_ten() -> None:
    lines = [line for line in program().splitlines() if line.strip()]
    assert len(lines) - sum(line.startswith(("import", "from")) for line in lines) <= 10


def test_ten_lines_print_what_was_stored_and_the_peak(store_directory: Path) -> None:
    small = program().replace('"/nvme"', repr(str(store_directory))).replace("16384", "2048").replace("128MiB", "8MiB")
    assert small.count(str(store_directory)) == small.count("2048") == small.count("8MiB") == 1
    done = subprocess.run([sys.executable, "-c", small], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"(?m)^peak: \d+ MiB$", done.stdout)
    assert "tierstore" in done.stdout.splitlines()[0]

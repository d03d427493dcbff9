"""One row of the matrix: the bounded suite on one torch and one Python, and the table of all rows."""

import datetime
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from .environments import ROOT, NotAvailableError, Workshop, find_python

__all__ = ["LONG", "SUITE", "Row", "outcome_with", "run_row", "table_of", "written_into"]

SUITE = (
    "hooks/test_gradients.py",
    "hooks/test_scopes.py",
    "hooks/test_selective_checkpoint.py",
    "hooks/test_aliases.py",
    "hooks/test_in_place.py",
    "hooks/test_kept.py",
    "hooks/test_unsupported.py",
    "hooks/test_modes.py",
    "hooks/test_functional.py",
    "hooks/test_compile.py",
    "hooks/test_custom_functions.py",
    "hooks/test_repeated_backward.py",
    "hooks/test_module.py",
    "hooks/test_module_checkpoints.py",
    "store/test_torch_names.py",
    "store/test_errors.py",
    "store/test_public_names.py",
    "store/test_store.py",
    "store/test_ownership.py",
    "store/test_lent.py",
    "store/test_layout.py",
    "daemon/test_connected_store.py",
    "daemon/test_survival.py",
)
"""The files of tests/ that a release of torch or Python can break: hooks, store, daemon. Some minutes."""
LONG = (
    "hooks/test_gradients.py",
    "hooks/test_in_place.py",
    "hooks/test_compile.py",
    "hooks/test_module.py",
    "store/test_store.py",
    "daemon/test_survival.py",
)
"""Of them, those that take three quarters of the time."""
_TIME_LIMIT_SECONDS = 1500.0
_BEGIN, _END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"


@dataclass(frozen=True)
class Row:
    """What was found.

    Attributes:
        torch, python: versions.
        passed, skipped, failed: tests.
        reason: why there are no figures, or why the run as a whole failed; "" where it did neither.
        is_broken: tests failed, or ended early; a row that cannot be installed is not broken.
    """

    torch: str
    python: str
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    reason: str = ""
    is_broken: bool = False


def run_row(workshop: Workshop, torch: str, python: str, suite: Sequence[str] = SUITE) -> Row:
    """Install and test one pair. Blocks for minutes.

    Args:
        workshop: for the environment.
        torch: "oldest", "newest", or a version.
        python: a version, or a path.
        suite: files of tests/.
    """
    try:
        interpreter = find_python(python)
        name = f"torch-{torch}-python-{python.strip('/').replace('/', '-')}"
        inside = workshop.environment(name, interpreter, torch)
    except NotAvailableError as error:
        return Row(torch, python, reason=str(error))
    return outcome_with(inside, workshop.folder / f"{name}.xml", [f"tests/{file}" for file in suite])


def outcome_with(inside: Path, report: Path, files: Sequence[str]) -> Row:
    """Test with an interpreter. Blocks for minutes.

    Args:
        inside: the interpreter.
        report: for the outcomes; what pytest prints goes to a file beside it.
        files: to test.
    """
    report.unlink(missing_ok=True)
    command = [str(inside), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(report)]
    versions = _versions_of(inside)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        with report.with_suffix(".log").open("w", encoding="utf-8") as log:
            done = subprocess.run(
                [*command, *files],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=_TIME_LIMIT_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return Row(*versions, reason=f"not done after {_TIME_LIMIT_SECONDS:g} s", is_broken=True)
    if done.returncode not in (0, 1) or not report.exists():
        return Row(*versions, reason=f"pytest ended with {done.returncode}: see {report.stem}.log", is_broken=True)
    passed, skipped, failed = _counts(report)
    return Row(*versions, passed, skipped, failed, is_broken=failed > 0)


def _versions_of(inside: Path) -> tuple[str, str]:
    question = "import platform, importlib.metadata as m; print(m.version('torch'), platform.python_version())"
    done = subprocess.run([str(inside), "-c", question], capture_output=True, text=True, timeout=60, check=True)
    torch, python = done.stdout.split()
    return torch, python


def _counts(report: Path) -> tuple[int, int, int]:
    """How many tests passed, were skipped, and failed."""
    total = skipped = failed = 0
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        total += int(suite.attrib["tests"])
        skipped += int(suite.attrib["skipped"])
        failed += int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return total - skipped - failed, skipped, failed


def table_of(rows: Sequence[Row], today: datetime.date, left_out: Sequence[str] = ()) -> str:
    """The rows that were run in Markdown, when that was, and which files of the suite were left out."""
    without = f", without {', '.join(f'`tests/{file}`' for file in left_out)}" if left_out else ""
    lines = [
        f"Run on {today.isoformat()}{without}.",
        "",
        "| torch | Python | passed | skipped | failed |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row.is_broken and row.reason:
            lines.append(f"| {row.torch} | {row.python} | {row.reason.replace('|', '/')} | - | - |")
        elif not row.reason:
            lines.append(f"| {row.torch} | {row.python} | {row.passed:,} | {row.skipped} | {row.failed} |")
    return "\n".join([*lines, ""])


def written_into(page: str, table: str) -> str:
    """The page with that table in the place of the one before. Raises ValueError: it has no such place."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {_BEGIN.strip()} and {_END.strip()}")
    return before + begin + table + end + after

"""One row of the matrix: the bounded suite on one torch and one Python, and the table of all rows."""

import datetime
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["ROOT", "SUITE", "Row", "outcome_with", "requirements_with", "run_row", "table_of", "written_into"]

ROOT = Path(__file__).parents[2]
_HOOKS = (
    "gradients scopes selective_checkpoint aliases in_place kept unsupported modes functional compile custom_functions "
    "repeated_backward module module_checkpoints"
)
_STORE = "torch_names errors public_names store ownership outstanding layout"
SUITE = tuple(
    f"{room}/test_{name}.py"
    for room, names in (("hooks", _HOOKS), ("store", _STORE), ("daemon", "connected_store survival"))
    for name in names.split()
)
"""The files of tests/ that a release of torch or Python can break: hooks, store, daemon. Some minutes."""
_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
_TIME_LIMIT_SECONDS = 1800.0
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

    @property
    def outcome(self) -> str:
        return self.reason or f"{self.passed} passed, {self.skipped} skipped, {self.failed} failed"


def requirements_with(torch: str) -> list[str]:
    """What pip is to install, with the "oldest" torch that pyproject.toml allows, the "newest", or a version."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (of_torch,) = [each for each in needed if re.match(r"torch\W", each)]
    oldest = f"{of_torch.replace('>=', '==')}.*"
    chosen = {"oldest": oldest, "newest": "torch"}.get(torch, f"torch=={torch}")
    return [chosen, *(each for each in needed if each != of_torch), *_TOOLS]


def run_row(folder: Path, torch: str, python: str, suite: Sequence[str] = SUITE) -> Row:
    """Install and test one pair. Blocks for minutes; takes some GB meanwhile.

    Args:
        folder: for the environment, which is removed afterwards, and for what the tests say.
        torch: as `requirements_with` takes it.
        python: a version, or the path of an interpreter.
        suite: files of tests/.
    """
    interpreter = shutil.which(python if "/" in python else f"python{python}")
    if interpreter is None:
        return Row(torch, python, reason=f"no interpreter python{python} is found")
    constraints = folder / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    constraints.write_text("".join(line for line in pinned if not line.startswith("torch==")), encoding="utf-8")
    with tempfile.TemporaryDirectory(dir=folder) as home:
        inside = Path(home, "bin", "python")
        pip = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in (
            [interpreter, "-m", "venv", home],
            [*pip, "--constraint", str(constraints), *requirements_with(torch)],
            [*pip, "--no-deps", "--editable", str(ROOT)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_SECONDS, check=False)
            if done.returncode:
                lines = (done.stderr or done.stdout).strip().splitlines()
                errors = [line for line in lines if line.startswith("ERROR")] or lines
                return Row(torch, python, reason=errors[-1] if errors else f"{command[0]} ended with {done.returncode}")
        name = f"torch-{torch}-python-{python.strip('/').replace('/', '-')}.xml"
        return outcome_with(inside, folder / name, [f"tests/{file}" for file in suite])


def outcome_with(inside: Path, report: Path, files: Sequence[str]) -> Row:
    """Test with an interpreter. Blocks for minutes.

    Args:
        inside: the interpreter.
        report: for the outcomes; what pytest prints goes to a file beside it.
        files: to test.
    """
    report.unlink(missing_ok=True)
    question = "import platform, importlib.metadata as m; print(m.version('torch'), platform.python_version())"
    versions = subprocess.run([str(inside), "-c", question], capture_output=True, text=True, check=True).stdout.split()
    command = [str(inside), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(report), *files]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        with report.with_suffix(".log").open("w", encoding="utf-8") as log:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=_TIME_LIMIT_SECONDS, check=False
            )
    except subprocess.TimeoutExpired:
        return Row(*versions, reason=f"not done after {_TIME_LIMIT_SECONDS:g} s", is_broken=True)
    if done.returncode not in (0, 1) or not report.exists():
        return Row(*versions, reason=f"pytest ended with {done.returncode}: see {report.stem}.log", is_broken=True)
    suites = [suite.attrib for suite in ElementTree.parse(report).getroot().iter("testsuite")]
    total, skipped, failures, errors = (
        sum(int(suite[kind]) for suite in suites) for kind in ("tests", "skipped", "failures", "errors")
    )
    failed = failures + errors
    return Row(*versions, total - skipped - failed, skipped, failed, is_broken=failed > 0)


def table_of(rows: Sequence[Row], today: datetime.date) -> str:
    """The rows that were run in Markdown, and when that was."""
    lines = [f"Run on {today.isoformat()}.", ""]
    lines += ["| torch | Python | passed | skipped | failed |", "|---|---|---|---|---|"]
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

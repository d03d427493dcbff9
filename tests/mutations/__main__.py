"""Every rule that keeps gradients right, broken clause by clause: do the tests notice?

    python -m tests.mutations [--jobs N] [R4 ...]

For each mutation a copy of the project is made, one piece of its text replaced, and the tests run that are meant to
notice. Before that they are run once on a copy in which nothing was replaced, where all of them have to pass: what
they notice later is the mutation. A mutation that they do not notice has survived: the table says so, and the command
fails. It also fails where the text to replace is not there once, and where the tests do not come to run.
`test_mutations.py` checks in a second that every piece of text and every test is still there; this takes minutes, and
is run by hand.

What is broken, and how, stands in `tests/mutation_table.py`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console
from rich.table import Table

from tests.mutation_table import MUTATIONS, RULES, UNSHOWN, Mutation

__all__ = ["ROOT"]

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240
"""For the tests of one mutation; each test has a limit of its own, which pytest enforces."""
_COPIED = ("tierstore", "hooks", "daemon", "tests", "examples", "pyproject.toml")


class Verdict(NamedTuple):
    """What became of a mutation.

    Attributes:
        caught: the tests noticed it.
        told: by which one, or what happened instead.
    """

    caught: bool
    told: str


def _copy(destination: Path) -> None:
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, destination / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, destination / name)


def _run(copy: Path, tests: list[str], *options: str) -> subprocess.CompletedProcess[str] | None:
    """Run tests of a copy; None: they did not end in time."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "30", "-p", "no:cacheprovider", *options]
    process = subprocess.Popen(
        command + [f"tests/{test}" for test in tests],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what it has started too
        process.communicate()
        return None
    return subprocess.CompletedProcess(command, process.returncode, output)


def _judge(mutation: Mutation) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        copy = Path(scratch)
        _copy(copy)
        path = copy / mutation.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutation.before) != 1:
            return Verdict(False, "DOES NOT APPLY: its text is not there once")
        path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
        done = _run(copy, list(mutation.tests), "-x")
    if done is None:
        return Verdict(True, "the tests do not end")
    if done.returncode == pytest.ExitCode.OK:
        return Verdict(False, "SURVIVED")
    if done.returncode < 0:
        return Verdict(True, f"the process is ended by signal {-done.returncode}")
    if done.returncode != pytest.ExitCode.TESTS_FAILED:
        return Verdict(False, f"DOES NOT RUN: {done.stdout.strip().splitlines()[-1]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return Verdict(True, failed[0].split(" ")[1].removeprefix("tests/") if failed else "a test does not end")


def _pass_unbroken(mutations: list[Mutation]) -> bool:
    """Whether all tests of the mutations pass where nothing was replaced; says which do not."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    passed = True
    for test in sorted({test.split("::")[0] for test in tests}):
        with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
            _copy(Path(scratch))
            of_file = [other for other in tests if other.split("::")[0] == test]
            done = _run(Path(scratch), [test] if test in of_file else of_file)
        if done is None or done.returncode != pytest.ExitCode.OK:
            passed = False
            print(f"fails already where nothing was replaced: {test}\n{done.stdout if done else 'it does not end'}")
    return passed


def main() -> int:
    """Run the mutations of the rules that are named (default: all); 1 if one of them is not caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="*", metavar="RULE", help=f"of {', '.join(RULES)}; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    given = parser.parse_args()
    if unknown := [rule for rule in given.rules if rule not in RULES]:
        parser.error(f"no rule is called {', '.join(unknown)}; there are {', '.join(RULES)}")
    chosen = [mutation for mutation in MUTATIONS if not given.rules or mutation.rule in given.rules]
    table = Table()
    for column in ("rule", "clause that was broken", "caught by"):
        table.add_column(column, overflow="fold")
    num_caught = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        unbroken = pool.submit(_pass_unbroken, chosen)
        for mutation, verdict in zip(chosen, pool.map(_judge, chosen), strict=True):
            num_caught += verdict.caught
            print(f"{mutation.rule}: {mutation.clause}: {verdict.told}", file=sys.stderr, flush=True)
            table.add_row(mutation.rule, mutation.clause, verdict.told)
    console = Console()
    console.print(table)
    for unshown in UNSHOWN:
        if not given.rules or unshown.rule in given.rules:
            console.print(f"not shown: {unshown.rule}, {unshown.clause}: {unshown.reason}")
    console.print(f"{len(chosen)} mutations, {num_caught} caught, {len(chosen) - num_caught} not")
    return 0 if unbroken.result() and num_caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Every rule that keeps gradients right, broken clause by clause: do the tests notice?

    python -m tests.mutations [--jobs N] [R4 ...]

For each mutation a copy of the project is made, one piece of its code changed, and the tests run that are meant to
notice. Before that they are run once on a copy in which nothing was changed, where all of them have to pass: what they
notice later is the mutation. A mutation that they do not notice has survived: the table says so, and the command
fails. It also fails where a change does not fit the code, and where the tests do not come to run. `test_mutations.py`
checks in seconds that every change fits and that every test is there; this takes minutes, and is run by hand.

Each rule has a file beside this one, like `r01_in_place.py`; `rules.py` says what stands in it.
"""

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

from .changes import PRODUCT, ROOT, UnfitChangeError
from .rules import Mutation, node_id, read_rules

_LIMIT_SECONDS = 240
"""For the tests of one mutation; each test has a limit of its own, which pytest enforces."""
_COPIED = (*PRODUCT, "tests", "examples", "pyproject.toml")


class Verdict(NamedTuple):
    """Whether the tests noticed a mutation, and which one, or what happened instead."""

    caught: bool
    told: str


def _run_copy(tests: list[str], *options: str, changed: tuple[Path, str] | None = None) -> tuple[int | None, str]:
    """The exit code and output of tests of a copy of the project, in which one file may be changed; None: they did not
    end in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not many", "--timeout", "30", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory(prefix="mutation-") as copy:
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, Path(copy, name), symlinks=True, ignore=ignored)
            else:
                shutil.copy(source, Path(copy, name))
        if changed is not None:
            Path(copy, changed[0]).write_text(changed[1], encoding="utf-8")
        process = subprocess.Popen(
            [*command, *options, *(f"tests/{test}" for test in tests)],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": copy, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it has started too
            process.communicate()
            return None, "it does not end"
    return process.returncode, output


def _judge(mutation: Mutation) -> Verdict:
    try:
        changed = mutation.change.made()
    except UnfitChangeError as error:
        return Verdict(False, f"DOES NOT APPLY: {error}")
    code, output = _run_copy([node_id(test) for test in mutation.tests], "-x", changed=changed)
    if code is None:
        return Verdict(True, "the tests do not end")
    if code == pytest.ExitCode.OK:
        return Verdict(False, "SURVIVED")
    if code < 0:
        return Verdict(True, f"the process is ended by signal {-code}")
    if code != pytest.ExitCode.TESTS_FAILED:
        return Verdict(False, f"DOES NOT RUN: {output.strip().splitlines()[-1]}")
    failed = [line for line in output.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return Verdict(True, failed[0].split(" ")[1].removeprefix("tests/") if failed else "a test does not end")


def _pass_unbroken(mutations: list[Mutation]) -> bool:
    """Whether all tests of the mutations pass where nothing was changed; says which do not."""
    tests = sorted({node_id(test) for mutation in mutations for test in mutation.tests})
    passed = True
    for file in sorted({test.split("::")[0] for test in tests}):
        of_file = [test for test in tests if test.split("::")[0] == file]
        code, output = _run_copy([file] if file in of_file else of_file)
        if code != pytest.ExitCode.OK:
            passed = False
            print(f"fails already where nothing was changed: {file}\n{output}")
    return passed


def main() -> int:
    """Run the mutations of the rules that are named (default: all); 1 if one of them is not caught."""
    rules = {rule.name: rule for rule in read_rules()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="*", metavar="RULE", help=f"of {', '.join(rules)}; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    given = parser.parse_args()
    if unknown := [name for name in given.rules if name not in rules]:
        parser.error(f"no rule is called {', '.join(unknown)}; there are {', '.join(rules)}")
    chosen = [rule for rule in rules.values() if not given.rules or rule.name in given.rules]
    mutations = [mutation for rule in chosen for mutation in rule.mutations]
    table = Table()
    for column in ("rule", "clause that was broken", "caught by"):
        table.add_column(column, overflow="fold")
    num_caught = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        unbroken = pool.submit(_pass_unbroken, mutations)
        for mutation, verdict in zip(mutations, pool.map(_judge, mutations), strict=True):
            num_caught += verdict.caught
            print(f"{mutation.rule}: {mutation.clause}: {verdict.told}", file=sys.stderr, flush=True)
            table.add_row(mutation.rule, mutation.clause, verdict.told)
    console = Console()
    console.print(table)
    for rule in chosen:
        for clause, reason in rule.unshown.items():
            console.print(f"not shown: {rule.name}, {clause}: {reason}")
    console.print(f"{len(mutations)} mutations, {num_caught} caught, {len(mutations) - num_caught} not")
    return 0 if unbroken.result() and num_caught == len(mutations) else 1


if __name__ == "__main__":
    sys.exit(main())

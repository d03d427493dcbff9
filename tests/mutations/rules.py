"""Reads the rules. Each has a file beside this one, such as `r01_in_place.py`.

Such a file begins with the name of the rule and the rule in one sentence. Its `MUTATIONS` are grouped by the tests that
have to notice them: `{test: {clause of the rule: how it is broken}}`. Its `UNSHOWN` holds the clauses that no mutation
shows, each with the reason.

R1 to R15 keep gradients right (`ARCHITECTURE.md`). P1 to P6 are the rules of the sidecar's protocol as
`sidecar/messages.py` numbers them. All other code is sampled at random: `make mutants`.
"""

import re
from collections import defaultdict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from .changes import ROOT, Change

__all__ = ["Mutation", "Rule", "node_id", "read_rules"]

_DEFINITION = re.compile(r"^(?:class (?P<group>\w+)|(?P<method> +)?(?:async )?def (?P<test>test_\w+)\()", re.MULTILINE)


class Mutation(NamedTuple):
    """One clause of a rule, how to break it, and the tests that have to notice, as `node_id` takes them."""

    rule: str
    clause: str
    change: Change
    tests: tuple[str, ...]


class Rule(NamedTuple):
    """A rule, its mutations, and why some of its clauses have none."""

    name: str
    sentence: str
    mutations: tuple[Mutation, ...]
    unshown: dict[str, str]


def read_rules() -> list[Rule]:
    """All rules, by the names of their files."""
    return [_read(path.stem) for path in sorted(Path(__file__).parent.glob("[a-z][0-9][0-9]_*.py"))]


def _read(file: str) -> Rule:
    module = import_module(f".{file}", __package__)
    name, _, sentence = module.__doc__.partition("\n")[0].partition(": ")
    mutations = tuple(
        Mutation(name, clause, change, (tests,) if isinstance(tests, str) else tests)
        for tests, clauses in module.MUTATIONS.items()
        for clause, change in clauses.items()
    )
    return Rule(name, sentence, mutations, getattr(module, "UNSHOWN", {}))


def node_id(name: str) -> str:
    """The file or node id, below `tests/`, of a test: `test_one`, with its parameters in brackets where it should be
    one case; `test_file.py`, a whole file; or `test_file.py::test_one`, where several files have a test of that name.
    LookupError: no test is called so, or several are."""
    name, bracket, parameters = name.partition("[")
    path, _, test = (name, "", "") if name.endswith(".py") else name.rpartition("::")
    found = [node for node in _nodes()[test] if f"/{node.partition('::')[0]}".endswith(f"/{path}" if path else "")]
    if len(found) != 1:
        raise LookupError(f"{name}: {len(found)} tests are called so: {', '.join(found)}")
    return f"{found[0]}{bracket}{parameters}"


@cache
def _nodes() -> dict[str, list[str]]:
    """Node ids by the name of the test. That of a whole file is empty."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = path.relative_to(ROOT / "tests").as_posix()
        found[""].append(file)
        group = ""
        for match in _DEFINITION.finditer(path.read_text(encoding="utf-8")):
            if match["group"] is not None:
                group = match["group"]
            else:
                found[match["test"]].append("::".join([file, *([group] if match["method"] else []), match["test"]]))
    return found

"""Reads the rules. Each has a file beside this one, such as `r01_in_place.py`.

Such a file begins with the name of the rule and the rule in one sentence. Its `MUTATIONS` are grouped by the tests that
have to notice them: `{test: {clause of the rule: how it is broken}}`. Its `UNSHOWN` holds the clauses that no mutation
shows, each with the reason.

R1 to R15 keep gradients right (`ARCHITECTURE.md`). P1 to P6 are the rules of the sidecar's protocol as
`sidecar/messages.py` numbers them. All other code is sampled at random: `make mutants`.
"""

from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from .changes import Change

__all__ = ["Mutation", "Rule", "read_rules"]


class Mutation(NamedTuple):
    """One clause of a rule, and how to break it.

    Attributes:
        rule: its name.
        clause: in words.
        change: what breaks it.
        tests: that have to notice, as `node_id` takes them.
    """

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

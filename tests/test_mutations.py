"""The table of mutations fits the code that it breaks; `python -m tests.mutations` breaks it."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.mutation_table import MUTATIONS, RULES, UNSHOWN, Mutation
from tests.mutations.__main__ import ROOT


@cache
def names_in(file: str) -> frozenset[str]:
    """What a file of tests defines, as in node ids: `test_one`, `TestClass::test_two`."""
    found = set()
    for statement in ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.FunctionDef):
            found.add(statement.name)
        elif isinstance(statement, ast.ClassDef):
            found |= {f"{statement.name}::{part.name}" for part in statement.body if isinstance(part, ast.FunctionDef)}
    return frozenset(found)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.rule}: {mutation.clause}")
def test_mutation_fits_the_code(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.before) == 1
    assert mutation.before != mutation.after
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        defined = names_in(file)
        assert not name or name.split("[")[0] in defined


def test_every_rule_is_broken_once_at_least() -> None:
    assert {mutation.rule for mutation in MUTATIONS} == set(RULES)
    assert {unshown.rule for unshown in UNSHOWN} <= set(RULES)


def test_no_clause_is_named_twice() -> None:
    clauses = [(entry.rule, entry.clause) for entry in [*MUTATIONS, *UNSHOWN]]
    assert len(clauses) == len(set(clauses))

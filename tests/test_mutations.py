"""Every mutation fits the code that it breaks, and its tests are there; `python -m tests.mutations` runs them."""

import ast

import pytest

from tests.mutations.noticing import node_id
from tests.mutations.rules import Mutation, read_rules

RULES = read_rules()
MUTATIONS = [mutation for rule in RULES for mutation in rule.mutations]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.rule}: {mutation.clause}")
def test_mutation_fits_the_code(mutation: Mutation) -> None:
    changed = mutation.change.made()
    unchanged = {id(statement) for statement in changed.before.body}
    for statement in changed.after.body:
        if id(statement) not in unchanged:
            compile(ast.unparse(statement), changed.path, "exec")
    assert mutation.tests
    for test in mutation.tests:
        node_id(test)


def test_every_rule_is_named_once_and_broken_once_at_least() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.mutations
        assert rule.sentence.endswith(".")


def test_no_clause_is_named_twice() -> None:
    clauses = [(mutation.rule, mutation.clause) for mutation in MUTATIONS]
    clauses += [(rule.name, clause) for rule in RULES for clause in rule.unshown]
    assert len(clauses) == len(set(clauses))

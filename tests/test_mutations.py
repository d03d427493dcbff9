"""Every mutation fits the code that it breaks, and its tests are there; `python -m tests.mutations` runs them."""

import pytest

from tests.mutations.rules import Mutation, node_id, read_rules

RULES = read_rules()
MUTATIONS = [mutation for rule in RULES for mutation in rule.mutations]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.rule}: {mutation.clause}")
def test_mutation_fits_the_code(mutation: Mutation) -> None:
    path, changed = mutation.change.made()
    compile(changed, path, "exec")
    assert mutation.tests
    for test in mutation.tests:
        node_id(test)


def test_every_rule_is_broken_and_every_clause_is_named_once() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.mutations
        assert rule.sentence.endswith(".")
    clauses = [(mutation.rule, mutation.clause) for mutation in MUTATIONS]
    clauses += [(rule.name, clause) for rule in RULES for clause in rule.unshown]
    assert len(clauses) == len(set(clauses))

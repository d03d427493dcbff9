"""The table of mutations fits the code that it breaks; `python -m tests.mutations` breaks it."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, ROOT, RULES, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.rule}: {mutation.clause}")
def test_mutation_fits_the_code(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.before) == 1
    for test in mutation.tests:
        assert (ROOT / "tests" / test).exists()


def test_every_rule_is_broken_once_at_least() -> None:
    assert {mutation.rule for mutation in MUTATIONS} == set(RULES)

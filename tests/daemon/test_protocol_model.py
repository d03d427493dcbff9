"""The protocol's rules are enough, and each is needed: every run of a small model, by exhaustive search."""

import pytest

from tests.daemon import model_client
from tests.daemon.protocol_model import Model, Rules, Scope
from tests.daemon.state_search import search

# Of each rule, left out: the smallest scope in which something goes wrong, and what does.
NEEDED = {
    "stored_after_commit": (Scope(1, 1, 1), "an acknowledged record is lost"),
    "extent_reused_after_commit": (Scope(2, 1, 1), "the extent of the live record B is free"),
    "released_slot_kept_until_answer": (Scope(2, 1, 1), "the slot is used by a job of the daemon"),
    "slot_kept_until_resumed": (Scope(1, 1, 1), "the slot is used by a job of the daemon"),
    "resumed_after_jobs": (Scope(1, 1, 1), "the slot is used by a job of the daemon"),
    "write_is_idempotent": (Scope(1, 1, 2), "leaked at rest: an extent"),
    "keys_are_never_reused": (Scope(2, 1, 1), "B comes back as A"),
    "discard_waits_for_job": (Scope(1, 1, 1), "leaked at rest: a record of a released handle"),
    "lease_end_waits_for_jobs": (
        Scope(2, 1, 1, client_dies=True),
        "another record is being written to the extent of the live record B",
    ),
}


@pytest.mark.parametrize(
    "scope",
    [
        Scope(1, 1, 1),
        Scope(1, 1, 2),
        Scope(2, 1, 1),
        Scope(2, 1, 2),
        Scope(2, 2, 1),
        Scope(2, 1, 1, client_dies=True),
        pytest.param(Scope(2, 2, 2), marks=pytest.mark.slow),
        pytest.param(Scope(2, 2, 2, client_dies=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_rules_kept_nothing_goes_wrong(scope: Scope) -> None:
    findings = search(Model(Rules(), scope))
    print(findings)
    assert findings.violation is None, str(findings)


def test_every_rule_is_left_out_once() -> None:
    assert set(NEEDED) == set(Rules._fields)


@pytest.mark.parametrize("rule", NEEDED)
def test_one_rule_left_out_something_goes_wrong(rule: str) -> None:
    scope, flaw = NEEDED[rule]
    findings = search(Model(Rules()._replace(**{rule: False}), scope))
    print(findings)
    assert findings.violation == flaw, str(findings)
    assert len(findings.trace) > 1
    kept = search(Model(Rules(), scope))
    assert kept.violation is None, str(kept)


@pytest.mark.parametrize("rule", ["released_slot_kept_until_answer", "slot_kept_until_resumed", "resumed_after_jobs"])
def test_slot_taken_too_early_bytes_are_lost(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the daemon still uses a slot is not only untidy: go on from there, and a read overwrites the only copy."""
    monkeypatch.setattr(model_client, "_unless_used", lambda state, slot, after: after)
    findings = search(Model(Rules()._replace(**{rule: False}), Scope(2, 1, 1)))
    assert findings.violation == "the slot with the only bytes of B was overwritten", str(findings)


def test_states_without_a_way_to_rest_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search itself: a daemon that, once killed, stays dead."""
    steps = Model._fault_steps
    monkeypatch.setattr(
        Model,
        "_fault_steps",
        lambda self, state: (step for step in steps(self, state) if step[0] != "the daemon is started"),
    )
    findings = search(Model(Rules(), Scope(1, 1, 1)))
    assert findings.violation == "no way to rest"
    assert findings.trace == ("the daemon is killed",)

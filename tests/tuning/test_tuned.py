"""Which candidate is chosen, and the file that says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.inspect_store import inspect_scope
from tierstore import TierStore, tiered_offload
from tierstore.tracing.reader import read_trace
from tierstore.tuning.settings import TrialSettings
from tierstore.tuning.tuned import Candidate, Tuned, choose

MIB = 2**20
SETTINGS = TrialSettings(8 * MIB, 16 * MIB, "zstd:1", "reverse", 4 * MIB, 9, 64 * 2**10)


def _candidate(name: str, *seconds: float, is_allowed: bool = True, failure: str | None = None) -> Candidate:
    return Candidate(name, SETTINGS, 1.0, seconds, is_allowed, failure)


REFERENCE = _candidate("as it is", 1.0, 1.01, 0.99)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([_candidate("faster", 0.9, 0.9, 0.9)], "faster"),
        ([_candidate("fast", 0.9, 0.9, 0.9), _candidate("fastest", 0.8, 0.8, 0.8)], "fastest"),
        ([_candidate("once slower", 0.5, 0.5, 1.0)], "as it is"),
        ([_candidate("hardly faster", 0.985, 0.995, 0.985)], "as it is"),
        ([_candidate("failed in the fourth", 0.5, 0.5, 0.5, failure="crashed")], "as it is"),
        ([_candidate("two rounds", 0.5, 0.5)], "as it is"),
        ([_candidate("too large", 0.5, 0.5, 0.5, is_allowed=False)], "as it is"),
        ([], "as it is"),
    ],
)
def test_choice_is_the_reference_unless_another_is_faster_every_time(others: list[Candidate], expected: str) -> None:
    chosen, reason = choose([REFERENCE, *others])
    assert chosen.name == expected
    assert (repr(expected) if chosen is not REFERENCE else "Keep your settings: ") in reason


def test_choice_beside_a_reference_that_wavers_needs_a_larger_gain() -> None:
    wavering = _candidate("as it is", 1.0, 1.4, 1.0)
    assert choose([wavering, _candidate("found", 0.9, 1.2, 0.9)])[0] is wavering


def _tuned(place: str, settings: TrialSettings, device_bytes: int | str) -> Tuned:
    chosen = Candidate("found\n1", settings, None, (0.5, 0.6), failure=None)
    of_scope = {"min_bytes": MIB, "device_bytes": device_bytes}
    return Tuned(place, of_scope, [REFERENCE, chosen], chosen, [], "it is\nfaster")


@pytest.mark.parametrize(
    ("prefetch", "lookahead_bytes", "device_bytes"), [("reverse", 4 * MIB, 5 * MIB), ("learned", None, "auto")]
)
def test_file_of_outcome_opens_a_store_and_a_scope_as_measured(
    prefetch: str,
    lookahead_bytes: int | None,
    device_bytes: int | str,
    store_directory: Path,
    tmp_path: Path,
) -> None:
    settings = replace(SETTINGS, prefetch=prefetch, lookahead_bytes=lookahead_bytes)
    tuned = _tuned(str(store_directory), settings, device_bytes)
    file = tmp_path / "tierstore.toml"
    file.write_text(tuned.toml)
    assert "# it is\\nfaster\n" in tuned.toml, "why"
    long = replace(tuned, reason="word " * 40).toml
    assert (long.count("# word"), long.count("word")) == (3, 40), "no line is longer than 80, and each is a comment"
    for config in (file, tuned.config):
        with TierStore.from_config(config) as store:
            scope = inspect_scope(tiered_offload.from_config(store, config))
            assert (store.host_bytes, store.staging_bytes) == (8 * MIB, 16 * MIB)
            assert (scope.prefetch, scope.lookahead_bytes) == (prefetch, lookahead_bytes or 24 * MIB)
            assert scope.device_bytes == (None if device_bytes == "auto" else device_bytes), "as the program has it"
            with store.trace(tmp_path / "trace.jsonl"):
                pass
            recorded = read_trace(tmp_path / "trace.jsonl").header.store
            assert (recorded.io_depth, recorded.inline_bytes) == (9, 64 * 2**10)

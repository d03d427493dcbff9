"""A saved tensor makes no more calls than it did. Their number is the same everywhere, as long as no call waits."""

from pathlib import Path

import pytest

from bench.calls import FLOOR, NUM_TENSORS, measure, round_trip
from tierstore.rules import windows

MOST = {"host": (27, 7), "stays on the device": (32, 12), "leaves the device": (60, 75)}
"""Packs and unpacks, beyond hooks that do nothing."""


def test_saved_tensor_makes_no_more_calls_than_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MOST_NOTED_BYTES", 4 * 2**20)  # as outside of the tests
    figures = measure("packs", tmp_path)
    for name, most in MOST.items():
        found = [figures[name][what] - figures[FLOOR][what] for what in ("packs", "unpacks")]
        assert all(number <= bound for number, bound in zip(found, most, strict=True)), f"{name}: {found}"


def test_round_trip_over_the_drive_is_counted_on_all_threads(tmp_path: Path) -> None:
    assert round_trip(tmp_path, 2**18, NUM_TENSORS // 4) > 100, "each tensor has a record of its own in the tests"

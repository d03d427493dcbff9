"""The search: what it tries, what it finds, and when it stops."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tierstore.errors import ConfigError
from tierstore.tuning.search import CODECS, IO_DEPTHS, Found, Predict, Space
from tierstore.tuning.search import search as search_while
from tierstore.tuning.settings import LEAST_STAGING_BYTES, TrialSettings, default_settings, working_bytes

MIB = 2**20
SPACE = Space(memory_bytes=512 * MIB, saved_bytes=300 * MIB)
START = default_settings(SPACE.memory_bytes)


def search(space: Space, known: list[TrialSettings], predict: Predict) -> Found:
    return search_while(space, known, predict, lambda: True)


def _seconds(settings: TrialSettings) -> float:
    """Less with memory up to what is saved, a quarter of the window, depth, and without a codec."""
    host = min(settings.host_bytes, 300 * MIB)
    codec = settings.codec != "none"
    return 10.0 - host / (100 * MIB) + settings.staging_bytes / (112 * MIB) + codec + 1 / settings.io_depth


def test_search_finds_what_all_combinations_hold() -> None:
    found = search(SPACE, [START], _seconds)
    every = [
        TrialSettings(host, window, codec, io_depth=depth)
        for window, depth in product(SPACE.windows(), IO_DEPTHS)
        for host, codec in product(SPACE.hosts(TrialSettings(0, window, io_depth=depth)), CODECS)
    ]
    assert _seconds(found.best(1)[0]) == pytest.approx(min(map(_seconds, every)))
    assert len(found.predicted) < len(every) / 3


@pytest.mark.parametrize("io_depth", [2, 4, 9])
def test_search_keeps_to_the_limit(io_depth: int) -> None:
    start = replace(START, io_depth=io_depth, host_bytes=START.host_bytes - working_bytes(io_depth))
    found = search(SPACE, [start], lambda settings: 1 / (1 + settings.memory_bytes))
    assert max(settings.memory_bytes for settings in found.predicted) == SPACE.memory_bytes
    assert all(settings.host_bytes >= 0 for settings in found.predicted)


@pytest.mark.parametrize("needed_bytes", [0, 150 * MIB])
def test_search_where_time_ties_prefers_less_memory_and_leaves_the_rest_alone(needed_bytes: int) -> None:
    best = search(SPACE, [START], lambda settings: 1.0 + (settings.host_bytes < needed_bytes)).best(1)[0]
    assert best == replace(START, host_bytes=needed_bytes, staging_bytes=min(SPACE.windows()))


def test_search_told_to_stop_has_what_it_must() -> None:
    other = replace(START, codec="zstd:1")
    found = search_while(SPACE, [START, other], _seconds, lambda: False)
    assert set(found.predicted) == {START, other}


def test_search_passes_over_settings_that_would_fail() -> None:
    found = search(SPACE, [START], lambda settings: None if settings.host_bytes > 10 else _seconds(settings))
    assert found.best(1)[0].host_bytes == 0
    assert search(SPACE, [START], lambda settings: None).best(3) == []


def test_best_has_two_other_codecs_the_better_first_and_then_what_is_predicted_otherwise() -> None:
    penalty = {"none": 0.0, "shuffle-zstd:1": 0.1, "auto": 0.2, "zstd:1": 0.3}

    def seconds(settings: TrialSettings) -> float:
        return _seconds(replace(settings, codec="none")) + penalty[settings.codec]

    first, second, third, fourth = search(SPACE, [START], seconds).best(4)
    assert [each.codec for each in (first, second, third)] == ["none", "shuffle-zstd:1", "auto"]
    assert replace(second, codec="none") == replace(third, codec="none") == first
    assert fourth.codec == "none"
    assert seconds(fourth) > seconds(first)


@pytest.mark.parametrize("memory_bytes", [LEAST_STAGING_BYTES, 20 * MIB, 112 * MIB, 223 * MIB, 224 * MIB, 2**40])
def test_default_settings_of_any_limit_keep_to_it(memory_bytes: int) -> None:
    settings = default_settings(memory_bytes)
    assert settings.memory_bytes == memory_bytes
    assert settings.staging_bytes >= LEAST_STAGING_BYTES
    with pytest.raises(ConfigError, match="host_bytes"):
        default_settings(LEAST_STAGING_BYTES - 1)

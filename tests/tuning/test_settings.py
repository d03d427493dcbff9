"""The limit that settings keep to, and which are tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierstore.errors import ConfigError
from tierstore.tuning.settings import (
    CODECS,
    LEAST_STAGING_BYTES,
    TrialSettings,
    default_settings,
    settings_to_try,
    working_bytes,
)

MIB = 2**20


@pytest.mark.parametrize("memory_bytes", [LEAST_STAGING_BYTES, 20 * MIB, 112 * MIB, 223 * MIB, 224 * MIB, 2**40])
def test_default_settings_of_any_limit_keep_to_it(memory_bytes: int) -> None:
    settings = default_settings(memory_bytes)
    assert settings.memory_bytes == memory_bytes
    assert settings.staging_bytes >= LEAST_STAGING_BYTES
    with pytest.raises(ConfigError, match="host_bytes"):
        default_settings(LEAST_STAGING_BYTES - 1)


@pytest.mark.parametrize("memory_bytes", [LEAST_STAGING_BYTES, 40 * MIB, 155 * MIB, 2**34])
@pytest.mark.parametrize("io_depth", [2, 4, 9, 40])
def test_settings_to_try_are_about_a_dozen_and_fill_the_limit(memory_bytes: int, io_depth: int) -> None:
    start = replace(default_settings(memory_bytes), io_depth=io_depth)
    tried = settings_to_try(start, memory_bytes)
    assert len(set(tried)) == len(tried) <= 12
    assert all(each.memory_bytes == memory_bytes and each.host_bytes >= 0 for each in tried)


def test_settings_to_try_vary_the_codec_and_the_depth_with_the_staging_there_is_and_with_little() -> None:
    start = TrialSettings(443 * MIB, 69 * MIB, "shuffle-zstd:3", "reverse", 4 * MIB, 4, None)
    tried = settings_to_try(start, 512 * MIB)
    for staging_bytes in (69 * MIB, 28 * MIB):
        alike = [each for each in tried if each.staging_bytes == staging_bytes]
        assert {each.codec for each in alike} == {*CODECS, "shuffle-zstd:3"}
        assert {each.io_depth for each in alike} == {4, 8}
    assert {each.staging_bytes for each in tried} == {size * MIB for size in (28, 56, 69, 112, 224)}
    assert {(each.prefetch, each.lookahead_bytes, each.inline_bytes) for each in tried} == {("learned", None, None)}
    deep = next(each for each in tried if each.io_depth == 8)
    assert deep.host_bytes == 512 * MIB - deep.staging_bytes - working_bytes(8)

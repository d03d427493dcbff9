"""Extents in segment files over a thousand steps of changing sizes: how much more is allocated than is in use?"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fragmentation import LOADS, run_load
from tierstore.disk import extents

SEGMENT_BYTES = 8 * 2**20


@pytest.mark.parametrize("load", LOADS)
async def test_space_stays_bounded_over_steps_of_changing_sizes_and_is_given_back(
    load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the benchmark of the same name, at 1/64 of its sizes."""
    monkeypatch.setattr(extents, "SEGMENT_BYTES", SEGMENT_BYTES)
    report = await run_load(load, tmp_path, num_steps=1000, largest_bytes=2**20, disk_bytes=2**30)
    assert report.most_live_bytes > 8 * SEGMENT_BYTES, "segments are too large to tell"
    assert report.most_allocated_bytes <= 1.25 * report.most_live_bytes + 2 * SEGMENT_BYTES
    assert report.most_allocated_bytes <= report.early_allocated_bytes + 2 * SEGMENT_BYTES, "it grows with every step"
    assert report.light_allocated_bytes <= report.light_live_bytes + 4 * SEGMENT_BYTES

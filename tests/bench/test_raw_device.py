"""The device beside a store: both in one file."""

import os
from pathlib import Path

import torch

from bench.raw_device import first_segment
from tierstore import TierStore


def test_first_segment_is_the_file_that_records_lie_in(tmp_path: Path) -> None:
    with TierStore(tmp_path, host_bytes=0) as store:
        handle = store.put(torch.randn(2**20))
        store.flush()
        assert os.fstat(first_segment(store)).st_blocks * 512 >= store.stats().disk_bytes > 0
        del handle

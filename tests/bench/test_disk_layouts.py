"""What the benchmark of layouts does to a store from outside."""

from __future__ import annotations

from pathlib import Path

import torch

from bench.disk_layouts import forget_cached
from tierstore import TierStore


def test_store_whose_pages_are_forgotten_reads_them_again(tmp_path: Path) -> None:
    with TierStore(tmp_path, host_bytes=0, inline_bytes=None) as store:
        handle = store.put(torch.arange(1000))
        store.flush()
        forget_cached(store)
        assert torch.equal(store.get(handle), torch.arange(1000))

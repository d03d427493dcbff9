"""`io_depth`: so many records are at the drive at once, each way, and their working memory is told."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.conftest import MakeStore
from tierstore.disk import local as local_module
from tierstore.disk.scratch import Scratch, ScratchPool

MIB = 2**20
ELEMENTS = 64 * 2**10  # 256 KiB: nothing of that lives in LMDB


@pytest.mark.usefixtures("no_native_threads")
@pytest.mark.parametrize("depth", [1, 4, 9])
def test_io_depth_records_are_at_the_drive_at_once_each_way_and_never_more(
    depth: int, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody leaves the drive before as many have come to it."""
    all_there = threading.Barrier(depth)
    taken: list[int] = []

    class WatchedPool(ScratchPool):
        @contextmanager
        def lend(self) -> Iterator[Scratch]:
            with super().lend() as scratch:
                taken.append(depth - self._idle.qsize())
                all_there.wait(20)
                yield scratch

    monkeypatch.setattr(local_module, "ScratchPool", WatchedPool)
    store = make_store(host_bytes=0, staging_bytes=64 * MIB, codec="none", io_depth=depth)
    values = [torch.full((ELEMENTS,), float(number)) for number in range(2 * depth)]
    handles = [store.put(value) for value in values]
    kept = [value.clone() for value in values]
    del values
    store.flush()
    store.prefetch(handles)
    for handle, value in zip(handles, kept, strict=True):
        assert torch.equal(store.get(handle), value)
    assert store.stats().read_bytes == 2 * depth * 4 * ELEMENTS
    assert max(taken) == depth
    assert len(taken) == 4 * depth

"""A disk tier of the user's own: what the contract asks is enough to train on it."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.store.disk_conformance import DiskConformance
from tierstore import ConfigError, StorageIOError, TierStore, tiered_offload
from tierstore.disk.tier import DiskTier, DiskUsage, Kind, Loaded, Stored
from tierstore.errors import StoreClosedError, StoreFullError

BUDGET = 64 * 2**20


class Deflated:
    """Keeps records in a mapping, deflated: the least that a disk tier can be."""

    scratch_bytes = 0

    def __init__(self, executor: Executor) -> None:
        self.contents: dict[int, tuple[bytes, int]] | None = {}
        self._executor = executor

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        content = await asyncio.get_running_loop().run_in_executor(self._executor, zlib.compress, source, 0)
        contents, disk_bytes = self._open(), self.usage().disk_bytes
        if disk_bytes + len(source) > BUDGET:
            raise StoreFullError(len(source), disk_bytes, BUDGET)
        contents[key] = content, len(source)
        return Stored(len(source), "deflate")

    async def read(self, key: int, destination: memoryview) -> Loaded:
        content, num_bytes = self._open()[key]
        if num_bytes != len(destination):
            raise ValueError(f"the record has {num_bytes} bytes")
        destination[:] = zlib.decompress(content)
        return Loaded(len(content))

    def confirms(self, key: int, memory: memoryview) -> bool:
        found = (self.contents or {}).get(key)
        return found is not None and zlib.decompress(found[0]) == memory

    async def discard(self, keys: Sequence[int]) -> None:
        contents = self._open()
        for key in keys:
            contents[key]
        for key in keys:
            del contents[key]

    def usage(self) -> DiskUsage:
        used = sum(num_bytes for _, num_bytes in (self.contents or {}).values())
        return DiskUsage(used, used, BUDGET, len(self.contents or {}), "in memory, deflated")

    def codec_choices(self) -> Mapping[str, Mapping[str, int]]:
        return {}

    def abandon_after_fork(self) -> None:
        self.contents = None

    async def close(self) -> None:
        self.contents = None

    def _open(self) -> dict[int, bytes]:
        if self.contents is None:
            raise StoreClosedError("deflated", "it was closed")
        return self.contents


class TestConformance(DiskConformance):
    @pytest.fixture
    async def tier(self) -> AsyncIterator[DiskTier]:
        with ThreadPoolExecutor(4) as executor:
            yield Deflated(executor)


def _gradients(model: nn.Module, inputs: torch.Tensor, store: TierStore | None) -> list[torch.Tensor]:
    model.zero_grad()
    if store is None:
        model(inputs).square().sum().backward()
    else:
        with tiered_offload(store, min_bytes="4KiB"):
            loss = model(inputs).square().sum()
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_training_over_it_has_the_same_bits() -> None:
    tiers: list[Deflated] = []

    async def open_disk(executor: Executor) -> DiskTier:
        tiers.append(Deflated(executor))
        return tiers[0]

    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)))
    inputs = torch.randn(512, 256)
    with TierStore.over(open_disk, name="deflated", host_bytes=0, staging_bytes="1MiB") as store:
        plain = _gradients(model, inputs, None)
        stored = _gradients(model, inputs, store)
        stats = store.stats()
        assert repr(store) == "<TierStore deflated>"
    assert all(torch.equal(one, other) for one, other in zip(plain, stored, strict=True))
    assert stats.spilled_bytes >= inputs.nbytes
    assert stats.io_mode == "in memory, deflated"
    assert tiers[0].contents is None, "it was not closed"


def test_what_cannot_be_opened_says_so() -> None:
    async def refuse(executor: Executor) -> DiskTier:
        raise OSError(5, "the shelf is locked")

    with pytest.raises(StorageIOError, match=r"shelf: .*the shelf is locked.*nothing was stored"):
        TierStore.over(refuse, name="shelf")
    with pytest.raises(ConfigError, match="open_disk=None cannot be used"):
        TierStore.over(None)  # type: ignore[arg-type]

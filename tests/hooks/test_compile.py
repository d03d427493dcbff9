"""Blocks that are compiled, under offloading: compile inside, offload outside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tierstore import TierStore, offload_module


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def _gradients(backend: str, store: TierStore | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(3)]
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    run: list[nn.Module] = [torch.compile(block, backend=backend) for block in blocks]  # type: ignore[misc]
    if store is not None:
        run = [offload_module(block, store=store, min_bytes=0) for block in run]
    found = []
    for step in range(3):
        hidden = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
        for parameter in parameters:
            parameter.grad = None
        for block in run:
            hidden = block(hidden)
        hidden.square().mean().backward()
        found += [parameter.grad.clone() for parameter in parameters]
    return found


@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_compiled_inside_offloaded_outside_same_bits(make_store: MakeStore, backend: str) -> None:
    plain = _gradients(backend, None)
    torch._dynamo.reset()
    store = make_store()
    for expected, found in zip(plain, _gradients(backend, store), strict=True):
        assert torch.equal(expected, found)
    stats = store.stats()
    assert stats.spilled_bytes > 0
    assert (stats.live_handles, stats.disk_bytes) == (0, 0)

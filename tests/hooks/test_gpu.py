"""The device tier on a real accelerator. Skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tierstore import ModifiedInPlaceError, TierStore, tiered_offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
]

WIDTH = 1024


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    return nn.Sequential(*layers).cuda()


def _step(model: nn.Module, store: TierStore | None, device_bytes: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    batch = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    if store is None:
        loss = model(batch).square().mean()
    else:
        with tiered_offload(store, device_bytes=device_bytes):
            loss = model(batch).square().mean()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("host_bytes", [0, "64MiB", "2GiB"])
@pytest.mark.parametrize("device_bytes", [0, 64 * 2**20])
def test_gradients_on_the_device_same_bits(make_store: MakeStore, host_bytes: int | str, device_bytes: int) -> None:
    store = make_store(host_bytes=host_bytes)
    model = _model()
    plain = _step(model, None)
    for _ in range(3):
        for expected, found in zip(plain, _step(model, store, device_bytes), strict=True):
            assert torch.equal(expected, found)
    torch.cuda.synchronize()
    stats = store.stats()
    assert stats.offloaded_bytes > 0
    assert stats.host_memory == "pinned"
    assert (stats.live_handles, stats.device_bytes, stats.host_bytes, stats.disk_bytes) == (0, 0, 0, 0)


def test_device_memory_of_saved_tensors_is_freed(make_store: MakeStore) -> None:
    def peak_of(store: TierStore | None) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        _step(model, store)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    model = _model()
    _step(model, None)
    store = make_store(host_bytes="2GiB")
    assert peak_of(store) < peak_of(None)


def test_packs_do_not_wait_for_the_device(make_store: MakeStore) -> None:
    store = make_store(host_bytes="2GiB")
    model = _model()
    _step(model, store)
    batch = torch.randn(4096, WIDTH, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with tiered_offload(store):
            loss = model(batch).square().mean()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loss.backward()


def test_saved_device_tensor_changed_in_place_raises(make_store: MakeStore) -> None:
    store = make_store(host_bytes="1GiB")
    weight = torch.ones(2**20, device="cuda", requires_grad=True)
    with tiered_offload(store):
        hidden = weight * 2
        loss = (hidden * hidden).sum()
    hidden.add_(1)
    with pytest.raises(ModifiedInPlaceError):
        loss.backward()

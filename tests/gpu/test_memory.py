"""Device memory is really freed, host memory is pinned to the byte, and the host never waits for the device."""

import gc

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tests.gpu.device import DEVICE, NEEDS_DEVICE, hold_up, is_pinned_at
from tests.hooks.granted import lock_held_by_another, sines
from tests.inspect_store import inspect
from tierstore import TierStore, tiered_offload
from tierstore.ledger.device_window import FLIGHT_BYTES, RELOAD_BYTES
from tierstore.tensors.slab import _address_of

pytestmark = NEEDS_DEVICE

WIDTH, ROWS, LAYERS = 1024, 16_384, 40
SAVED_BYTES = ROWS * WIDTH * 4
"""Of one layer: 64 MiB."""


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(DEVICE)


def _step(model: nn.Module, batch: torch.Tensor, store: TierStore | None, device_bytes: int | str = 0) -> None:
    if store is None:
        loss = model(batch).square().mean()
    else:
        with tiered_offload(store, device_bytes=device_bytes):
            loss = model(batch).square().mean()
    loss.backward()
    model.zero_grad()


def _peak_beyond_the_model(model: nn.Module, store: TierStore | None, device_bytes: int = 0) -> int:
    batch = torch.randn(ROWS, WIDTH, device=DEVICE)
    for _ in range(2):
        _step(model, batch, store, device_bytes)
    torch.cuda.synchronize()
    gc.collect()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _step(model, batch, store, device_bytes)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


@pytest.mark.parametrize("device_bytes", [0, 8 * SAVED_BYTES])
def test_peak_is_what_may_stay_and_what_is_in_flight(make_store: MakeStore, device_bytes: int) -> None:
    model = _model()
    plain = _peak_beyond_the_model(model, None)
    store = make_store(host_bytes="4GiB")
    peak = _peak_beyond_the_model(model, store, device_bytes)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    working = 6 * SAVED_BYTES  # a layer's input, output and gradients, and what is not settled yet
    assert plain >= LAYERS * SAVED_BYTES
    assert peak <= device_bytes + FLIGHT_BYTES + RELOAD_BYTES + gradients + working
    kept = {reason for reason, nbytes in store.stats().kept_bytes.items() if nbytes}
    assert kept <= {"parameter", "small", "alive elsewhere"}


def test_two_hundred_steps_nothing_grows(make_store: MakeStore) -> None:
    store = make_store(host_bytes="256MiB")
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(DEVICE)
    batch = torch.randn(1024, 512, device=DEVICE)
    held = []
    for number in range(200):
        _step(model, batch, store)
        if number in (20, 199):
            torch.cuda.synchronize()
            stats = store.stats()
            held.append((stats.live_handles, stats.host_bytes, stats.device_bytes, torch.cuda.memory_allocated()))
    assert held[0] == held[1]


def test_slab_is_pinned_from_its_first_byte_to_its_last_and_no_larger(make_store: MakeStore) -> None:
    store = make_store(host_bytes="100MiB", staging_bytes="30MiB")
    handle = store.put(torch.ones(2**20, device=DEVICE))
    torch.cuda.synchronize()
    slab, slot = inspect(store).slab, handle.record.slot
    slab.wait_until_pinned()
    assert store.stats().host_memory == "pinned"
    assert slab.size_bytes == 130 * 2**20
    first = _address_of(slab._mapped()) + slab._first
    assert is_pinned_at(first)
    assert is_pinned_at(first + slab.size_bytes - 1)
    assert not is_pinned_at(first + slab.size_bytes)
    assert slot is not None
    assert slot.as_plain_tensor().is_pinned()
    assert torch.equal(store.get(handle), torch.ones(2**20, device=DEVICE))


def test_auto_keeps_what_the_link_does_not_carry_meanwhile(make_store: MakeStore) -> None:
    """Copies of a model that computes so little take longer than its compute; what is found is less than it saves."""
    store = make_store(host_bytes="4GiB")
    model, batch = _model(), torch.randn(ROWS, WIDTH, device=DEVICE)
    for _ in range(5):
        _step(model, batch, store, "auto")
        inspect(store).slab.wait_until_pinned()
        torch.cuda.synchronize()
    stats = store.stats()
    assert 0 < stats.device_limit_bytes < LAYERS * SAVED_BYTES
    assert stats.device_bytes == 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("device_bytes", [0, "auto"])
def test_pack_asks_for_no_synchronisation(make_store: MakeStore, device_bytes: int | str) -> None:
    store = make_store(host_bytes="4GiB")
    model, batch = _model(), torch.randn(ROWS, WIDTH, device=DEVICE)
    for _ in range(3):
        _step(model, batch, store, device_bytes)
        inspect(store).slab.wait_until_pinned()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with tiered_offload(store, device_bytes=device_bytes):
            loss = model(batch).square().mean()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loss.backward()


def test_packs_of_what_stays_need_no_lock(make_store: MakeStore) -> None:
    """Of every storage on a device, PyTorch says that it is shared."""
    store, leaf = make_store(host_bytes="64MiB"), torch.full((32, 32), 0.5, device=DEVICE, requires_grad=True)
    with tiered_offload(store, min_bytes=0, device_bytes="1GiB"):
        values = [leaf * 2]
        with lock_held_by_another(store, lambda: values.append(values[-1].sin())):
            hidden = sines(100, values[-1])
        loss = hidden.sum()
    assert store.stats().packed_tensors == len(values) - 1 + 100
    loss.backward()


def test_pack_returns_while_the_device_is_still_busy_with_what_was_queued_before(make_store: MakeStore) -> None:
    store = make_store(host_bytes="4GiB")
    model, batch = _model(), torch.randn(ROWS, WIDTH, device=DEVICE)
    for _ in range(2):
        _step(model, batch, store)
        inspect(store).slab.wait_until_pinned()
    torch.cuda.synchronize()
    awake = hold_up(2.0)
    with tiered_offload(store):
        loss = model(batch).square().mean()
    assert not awake.query(), "forward waited for the device"
    loss.backward()

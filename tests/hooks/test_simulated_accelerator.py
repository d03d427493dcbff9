"""Whole training steps through the device tier, with copies that run late on threads of their own.

What is tested is the way of a record through OFFLOADING, slots, disk and reload; the order of streams is tested in
tests/store/test_device.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tests.hooks.programs import forget_after_error
from tierstore import TierStore, tiered_offload
from tierstore.copies import Marker
from tierstore.testing import SimulatedCopies


@pytest.fixture
def copies() -> Iterator[SimulatedCopies]:
    with SimulatedCopies() as engine:
        yield engine


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    return nn.Sequential(*blocks)


def _gradients(store: TierStore | None, device_bytes: int | str = 0, num_steps: int = 3) -> list[torch.Tensor]:
    model, found = _model(), []
    for step in range(num_steps):
        model.zero_grad()
        batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        if store is None:
            loss = model(batch).square().mean()
        else:
            with tiered_offload(store, min_bytes=0, device_bytes=device_bytes):
                loss = model(batch).square().mean()
            if step == 1:
                store.flush()  # in the other steps backward may be quicker than the drive
        loss.backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return found


@pytest.mark.parametrize("host_bytes", [0, "20KiB", "1GiB"])
@pytest.mark.parametrize("device_bytes", [0, 20_000, "auto", 1 << 30])
@pytest.mark.parametrize("codec", ["none", "shuffle-zstd"])
def test_gradients_through_the_device_tier_same_bits(
    make_store: MakeStore, copies: SimulatedCopies, host_bytes: int | str, device_bytes: int | str, codec: str
) -> None:
    store = make_store(host_bytes=host_bytes, codec=codec, copies=copies)
    for plain, offloaded in zip(_gradients(None), _gradients(store, device_bytes), strict=True):
        assert torch.equal(plain, offloaded)
    copies.synchronize()
    stats = store.stats()
    assert (copies.num_out > 0) == (device_bytes != 1 << 30)
    assert (stats.spilled_bytes > 0) == (host_bytes != "1GiB" and device_bytes != 1 << 30)
    assert (stats.live_handles, stats.device_bytes, stats.disk_bytes) == (0, 0, 0)


def test_graph_dropped_while_copies_run_everything_is_freed(make_store: MakeStore, copies: SimulatedCopies) -> None:
    store = make_store(copies=copies)
    for _ in range(5):
        with tiered_offload(store, min_bytes=0):
            loss = _model()(torch.randn(32, 64)).sum()
        del loss
    store.flush()
    copies.end()
    stats = store.stats()
    assert (stats.live_handles, stats.device_bytes, stats.host_bytes, stats.disk_bytes) == (0, 0, 0, 0)
    assert stats.staging_used_bytes == 0


def test_retain_graph_through_the_device_tier_same_bits(make_store: MakeStore, copies: SimulatedCopies) -> None:
    store = make_store(copies=copies)
    model = _model()
    batch = torch.randn(32, 64)
    model(batch).square().mean().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    with tiered_offload(store, min_bytes=0):
        loss = model(batch).square().mean()
    for _ in range(3):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert all(torch.equal(a, b.grad) for a, b in zip(plain, model.parameters(), strict=True))


def test_known_graph_what_the_device_may_not_keep_leaves_it_at_once(
    make_store: MakeStore, copies: SimulatedCopies
) -> None:
    """Ten matrices, of which the device keeps six and host memory two: whatever backward needs last goes first."""
    nbytes = 64 * 64 * 4
    store = make_store(copies=copies, host_bytes=2 * nbytes)
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(10)]
    batch = torch.randn(64, 64)
    counts = []
    for _ in range(3):
        before = copies.num_out, store.stats().spilled_bytes
        with tiered_offload(store, min_bytes=0, device_bytes=6 * nbytes):
            hidden = batch
            for number, weight in enumerate(weights):
                hidden = (hidden * weight).tanh()
                if number == 4:
                    early = copies.num_out - before[0]
            loss = hidden.sum()
        del hidden
        store.flush()
        counts.append((early, copies.num_out - before[0], (store.stats().spilled_bytes - before[1]) // nbytes))
        loss.backward()
        del loss
    assert counts == [(0, 4, 2), (3, 4, 2), (3, 4, 2)]


def test_part_of_a_storage_comes_back_at_the_address_it_had_modulo_the_allocators_blocks(
    make_store: MakeStore, copies: SimulatedCopies
) -> None:
    """Kernels are chosen by alignment: at another address the same sum may be added up in another order."""
    store = make_store(copies=copies)
    whole = torch.randn(4096)
    handle = store.put(whole[200:])
    store.flush()
    assert torch.equal(store.get(handle), whole[200:])
    assert handle.record.first_byte == 512


class LostDevice(SimulatedCopies):
    """Whose events can be asked no more once it is lost, as after an error that a device does not recover from."""

    is_lost = False

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> Marker:
        return LostMarker(self)


class LostMarker:
    def __init__(self, copies: LostDevice) -> None:
        self._copies = copies

    def query(self) -> bool:
        if self._copies.is_lost:
            raise RuntimeError("the device is lost")
        return False

    def synchronize(self) -> None:
        raise RuntimeError("the device is lost")


def test_device_lost_next_call_raises_and_close_returns(make_store: MakeStore) -> None:
    with LostDevice() as copies:
        store = make_store(copies=copies, host_bytes="1GiB")
        with tiered_offload(store, min_bytes=0):
            loss = _model()(torch.randn(32, 64)).sum()
        copies.is_lost = True
        with pytest.raises(RuntimeError, match="the device is lost"):
            loss.backward()
        store.close()
        forget_after_error()


class HeldCopies(SimulatedCopies):
    """Copies that are not made before somebody waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.markers: list[HeldMarker] = []
        self._queue.put(lambda: self.go.wait(20) and None)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> Marker:
        self.markers.append(HeldMarker(self, super().copy_out(source, target, stream)))
        return self.markers[-1]


class HeldMarker:
    def __init__(self, copies: HeldCopies, real: Marker) -> None:
        self._copies = copies
        self._real = real
        self.query = real.query

    def synchronize(self) -> None:
        self._copies.go.set()
        self._real.synchronize()


def test_close_while_copies_run_unpins_the_slab_when_they_are_over(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    over: list[bool] = []
    with HeldCopies() as copies:
        store = make_store(copies=copies, host_bytes="1GiB")
        slab = store.books.moves.slots.slab
        monkeypatch.setattr(slab, "unpin", lambda: over.extend(marker.query() for marker in copies.markers))
        with tiered_offload(store, min_bytes=0):
            loss = _model()(torch.randn(32, 64)).sum()
        store.close()
        copies.go.set()
        assert over
        assert all(over)
        del loss

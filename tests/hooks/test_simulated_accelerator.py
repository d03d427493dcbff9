"""Whole training steps through the device tier, with copies that run late on threads of their own.

What is tested is the way of a record through OFFLOADING, slots, disk and reload; the order of streams is tested in
tests/store/test_happens_before.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tests.device.fake import FakeDevice
from tests.hooks.programs import forget_after_error, half_leaf, sine_chain
from tests.inspect_store import inspect
from tierstore import StorageIOError, StoreClosedError, TierStore, tiered_offload
from tierstore.base.threads import is_thread_of_store
from tierstore.ledger.device import DeviceRules
from tierstore.residency.handle import Handle
from tierstore.residency.memory import StoreMemory
from tierstore.tensors.copies import Marker
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
@pytest.mark.parametrize("codec", ["none", "shuffle-zstd"])
def test_gradients_through_the_device_tier_same_bits(make_store: MakeStore, host_bytes: int | str, codec: str) -> None:
    expected = _gradients(None)
    for device_bytes in (0, 20_000, "auto", 1 << 30):
        with SimulatedCopies() as copies:
            store = make_store(host_bytes=host_bytes, codec=codec, copies=copies)
            for plain, offloaded in zip(expected, _gradients(store, device_bytes), strict=True):
                assert torch.equal(plain, offloaded)
            copies.synchronize()
            stats = store.stats()
            assert (copies.num_out > 0) == (device_bytes != 1 << 30)
            assert (stats.spilled_bytes > 0) == (host_bytes != "1GiB" and device_bytes != 1 << 30)
            assert (stats.live_handles, stats.device_bytes, stats.disk_bytes) == (0, 0, 0)
            store.close()


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


@pytest.mark.parametrize("staging_bytes", ["32KiB", "1MiB"], ids=["each by itself", "as a group"])
def test_device_full_nothing_is_copied_ahead_for_the_rest_of_that_backward(
    make_store: MakeStore, staging_bytes: str
) -> None:
    """Each try would cost the device's allocator its cache."""
    num_numbers, num_tensors = 64 * 64, 12
    plain = half_leaf(num_numbers)
    sine_chain(plain, num_tensors).backward()
    with SimulatedCopies(room_bytes=2 * 4 * num_numbers) as copies:
        store = make_store(copies=copies, host_bytes="1GiB", staging_bytes=staging_bytes)
        for _ in range(2):
            before, leaf = copies.num_refused, half_leaf(num_numbers)
            with tiered_offload(store, min_bytes=0):
                loss = sine_chain(leaf, num_tensors)
            copies.synchronize()
            store.stats()  # the copies out are over, and their memory is let go
            loss.backward()
            assert torch.equal(leaf.grad, plain.grad)
            # once ahead, and then by each that is asked for while the one before is in the way
            assert 0 < copies.num_refused - before <= num_tensors // 3
        del loss
        copies.synchronize()
        stats = store.stats()
        assert (stats.live_handles, stats.device_bytes, stats.host_bytes) == (0, 0, 0)


def _put_all(store: TierStore, copies: SimulatedCopies, content: list[torch.Tensor]) -> list[Handle]:
    """The copies out are over, and their memory is let go."""
    handles = [store.put(each.clone()) for each in content]
    copies.synchronize()
    store.stats()
    return handles


def test_device_full_what_is_asked_for_takes_the_place_of_what_was_copied_back(make_store: MakeStore) -> None:
    content = [torch.arange(1024) + number for number in range(3)]
    with SimulatedCopies(room_bytes=content[0].nbytes) as copies:
        store = make_store(copies=copies, host_bytes="1GiB")
        handles = _put_all(store, copies, content)
        for handle, expected in zip(handles, content, strict=True):
            assert torch.equal(store.get(handle), expected)
        assert copies.num_refused == 2


def test_device_full_of_what_is_in_use_raises_and_is_there_when_there_is_room(make_store: MakeStore) -> None:
    content = [torch.arange(1024) + number for number in range(2)]
    with SimulatedCopies(room_bytes=content[0].nbytes) as copies:
        store = make_store(copies=copies, host_bytes="1GiB")
        handles = _put_all(store, copies, content)
        in_use = store.get(handles[0])
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError) as raised:
                store.get(handles[1])
            assert "8192 bytes that backward asks for are in host memory still" in raised.value.__notes__[0]
        assert torch.equal(in_use, content[0])
        before = store.stats()
        assert (before.live_handles, before.host_bytes) == (2, 2 * 8192)
        del in_use, raised
        forget_after_error()
        assert torch.equal(store.get(handles[1]), content[1])


def test_copies_to_and_from_memory_that_is_not_pinned_are_counted(
    make_store: MakeStore, copies: SimulatedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(copies=copies, host_bytes="1GiB")
    slab, content = inspect(store).slab, torch.arange(1024)
    pageable = store.put(content.clone())
    copies.synchronize()
    store.stats()
    assert torch.equal(store.get(pageable), content)
    assert store.stats().pageable_copy_bytes == 2 * content.nbytes
    monkeypatch.setattr(slab, "is_pinned", lambda slot: slot.start is not None)
    store.put(content.clone())
    assert store.stats().pageable_copy_bytes == 2 * content.nbytes


class LostDevice(SimulatedCopies):
    """Whose events can be asked no more once it is lost, as after an error that a device does not recover from.

    `is_lost`: whether it is, for the thread that asks; who asks first would be chance."""

    is_lost: Callable[[], bool] = staticmethod(lambda: False)

    def _copy(self, *_: Any) -> Marker:
        return LostMarker(self)


class LostMarker:
    def __init__(self, device: LostDevice) -> None:
        self._device = device

    def query(self) -> bool:
        if self._device.is_lost():
            raise RuntimeError("the device is lost")
        return False

    def synchronize(self) -> None:
        raise RuntimeError("the device is lost")


def test_device_lost_next_call_raises_and_close_frees(make_store: MakeStore) -> None:
    with LostDevice() as copies:
        store = make_store(copies=copies, host_bytes="1GiB")
        with tiered_offload(store, min_bytes=0):
            loss = _model()(torch.randn(32, 64)).sum()
        copies.is_lost = lambda: not is_thread_of_store()
        with pytest.raises(RuntimeError, match="the device is lost"):
            loss.backward()
        store.close()
        assert store.stats().host_bytes == 0
        forget_after_error()


def test_device_lost_in_forward_is_told_at_the_end_of_the_scope_at_the_latest(make_store: MakeStore) -> None:
    with LostDevice() as copies:
        store = make_store(copies=copies, host_bytes="1GiB", staging_bytes=1)  # each tensor leaves alone, at once
        scope = tiered_offload(store, min_bytes=0).__enter__()
        loss = _model()(torch.randn(32, 64)).sum()
        with inspect(store).lock:
            inspect(store).devices.poll()  # the next calls do not ask
        copies.is_lost = lambda: not is_thread_of_store()
        with pytest.raises(RuntimeError, match="the device is lost"):
            scope.__exit__(None, None, None)
        assert loss.requires_grad, "the graph lives"
        store.close()


def test_device_lost_while_only_the_stores_own_thread_asks_backward_and_close_say_so(make_store: MakeStore) -> None:
    with LostDevice() as copies:
        store = make_store(copies=copies, host_bytes="1GiB")
        with tiered_offload(store, min_bytes=0):
            loss = _model()(torch.randn(32, 64)).sum()
        with inspect(store).lock:
            inspect(store).devices.poll()
        copies.is_lost = is_thread_of_store
        inspect(store).engine.wake()
        assert inspect(store).wait_until_closed(20)
        with pytest.raises(StoreClosedError, match="the device is lost") as raised:
            loss.backward()
        assert str(raised.value.__cause__) == "the device is lost"
        with pytest.raises(StorageIOError, match="the device is lost"):
            store.close()
        store.close()
        assert store.stats().host_bytes == 0
        forget_after_error()


@pytest.mark.parametrize(("owner", "move"), [(StoreMemory, "prepare_offload"), (DeviceRules, "reload")])
def test_graph_that_garbage_collection_finds_when_its_tensor_is_about_to_move_is_let_go(
    make_store: MakeStore, copies: SimulatedCopies, monkeypatch: pytest.MonkeyPatch, owner: type, move: str
) -> None:
    """The collector may run at any moment, on any thread."""
    store, garbage, do_move = make_store(copies=copies, host_bytes="1GiB"), [], getattr(owner, move)
    num_collected = 0

    def collect_and_move(*args: Any, **options: Any) -> Any:
        nonlocal num_collected
        num_collected += len(garbage)
        garbage.clear()
        return do_move(*args, **options)

    monkeypatch.setattr(owner, move, collect_and_move)
    leaf = torch.randn(64, 64, requires_grad=True)
    for _ in range(3):
        with tiered_offload(store, min_bytes=0, device_bytes=0):
            other = leaf.exp().square().sum()
            if move == "prepare_offload":
                garbage.append(other)
                del other
            loss = leaf.sin().exp().sum()
        if move == "reload":
            copies.synchronize()
            store.flush()  # all has left the device
            garbage.append(other)
            del other
        loss.backward()
        del loss
    assert num_collected == 3
    assert store.stats().live_handles == 0


def test_close_while_copies_run_unpins_the_slab_when_they_are_over(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    with FakeDevice() as copies:
        store = make_store(copies=copies, host_bytes="1GiB")
        monkeypatch.setattr(inspect(store).slab, "unpin", lambda: left.append(len(copies.queued)))
        with tiered_offload(store, min_bytes=0):
            loss = _model()(torch.randn(32, 64)).sum()
        assert copies.queued
        store.close()
        assert left == [0]
        del loss

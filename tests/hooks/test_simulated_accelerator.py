"""Whole training steps through the device tier, with copies that run late on threads of their own.

What is tested is the way of a record through OFFLOADING, slots, disk and reload; the order of streams is tested in
tests/store/test_device.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import MakeStore
from tests.gpu.device import make_windows_small
from tests.gpu.seen_copies import SeenCopies
from tests.hooks.late_copies import LateCopies
from tests.hooks.programs import forget_after_error
from tests.inspect_store import inspect
from tierstore import TierStore, tiered_offload
from tierstore.residency.copies import Marker
from tierstore.residency.graph_times import GraphTimes
from tierstore.residency.memory import StoreMemory
from tierstore.residency.slab import Slab
from tierstore.rules.coverage import Coverage
from tierstore.rules.device import DeviceRules
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


def test_small_windows_of_the_tests_on_a_device_are_those_of_the_store(
    make_store: MakeStore, copies: SimulatedCopies
) -> None:
    nbytes = 32 * 64 * 4
    store = make_store(copies=copies, host_bytes="1GiB")
    make_windows_small(store, 2 * nbytes)
    devices = inspect(store).devices
    assert devices.has_room_to_reload(2 * nbytes)
    with tiered_offload(store, min_bytes=0):
        loss = _model()(torch.randn(32, 64)).sum()
        assert devices.held_bytes <= 3 * nbytes  # the newest node's included
    loss.backward()
    assert not inspect(store).device_window.fits_reload(2 * nbytes + 1)


class _Gated(nn.Module):
    """Saves a storage whose two halves two functions ask for, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.both, self.down = nn.LayerNorm(64), nn.Linear(64, 512), nn.Linear(256, 64)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(self.norm(stream)).chunk(2, -1)
        return stream + self.down(nn.functional.silu(gate) * up)


def test_known_graph_a_storage_that_is_asked_for_twice_comes_back_once(
    make_store: MakeStore, copies: SimulatedCopies
) -> None:
    """It fills the window nearly; between the two requests others would come back ahead."""
    store = make_store(copies=copies, host_bytes="1GiB")
    make_windows_small(store, 3 * (32 * 512 * 4) // 2)
    torch.manual_seed(0)
    model = nn.Sequential(*(_Gated() for _ in range(4)))
    for _ in range(3):
        before = store.stats()
        with tiered_offload(store, min_bytes=0):
            loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        after = store.stats()
    reloaded_bytes = after.reloaded_bytes - before.reloaded_bytes  # what is still there need not come back
    assert 0 < reloaded_bytes <= after.offloaded_bytes - before.offloaded_bytes


def test_known_order_that_lacks_what_is_asked_for_same_bits(make_store: MakeStore, copies: SimulatedCopies) -> None:
    """Steps that end early teach an order of their own; then backward goes on to what that order does not have."""
    store = make_store(copies=copies, host_bytes="1GiB")
    make_windows_small(store, 3 * (32 * 512 * 4) // 2)
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(_Gated() for _ in range(4))), torch.randn(32, 64)
    late = list(model[2:].parameters())

    def gradients(wanted: list[nn.Parameter], is_offloaded: bool) -> list[torch.Tensor]:
        with tiered_offload(store, min_bytes=0) if is_offloaded else nullcontext():
            loss = model(batch).square().mean()
        return list(torch.autograd.grad(loss, wanted))

    for wanted in (late, late, list(model.parameters()), late, list(model.parameters())):
        pairs = zip(gradients(wanted, True), gradients(wanted, False), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


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


def test_part_of_a_storage_that_is_asked_for_while_it_is_copied_out_is_that_part(make_store: MakeStore) -> None:
    with LateCopies() as late:
        store = make_store(copies=late, host_bytes="1GiB")
        whole = torch.randn(4096)
        handle = store.put(whole[200:])
        store.stats()
        assert torch.equal(store.get(handle), whole[200:])
        assert (late.num_out, late.num_in) == (1, 0)


@pytest.mark.parametrize("num_tensors", [1, 3])
def test_device_full_while_copying_ahead_backward_goes_on_without(make_store: MakeStore, num_tensors: int) -> None:
    """Room for what is asked for, and a little more: what is copied ahead finds none."""
    with SimulatedCopies(room_bytes=num_tensors * 64 * 64 * 4) as copies:
        store = make_store(copies=copies, host_bytes="1GiB")
        for _ in range(20):  # until copies out are over when backward begins, which the thread that copies decides
            for plain, offloaded in zip(_gradients(None), _gradients(store), strict=True):
                assert torch.equal(plain, offloaded)
            if copies.num_refused:
                break
        assert copies.num_refused > 0
        copies.synchronize()
        stats = store.stats()
        assert (stats.live_handles, stats.device_bytes, stats.host_bytes) == (0, 0, 0)


def test_device_full_nothing_is_copied_ahead_for_the_rest_of_that_backward(make_store: MakeStore) -> None:
    """Each try would cost the device's allocator its cache."""
    nbytes, num_tensors = 64 * 64 * 4, 12
    with SimulatedCopies(room_bytes=2 * nbytes) as copies:
        store = make_store(copies=copies, host_bytes="1GiB")
        for _ in range(2):
            before = copies.num_refused
            with tiered_offload(store, min_bytes=0):
                hidden = torch.full((64, 64), 0.5, requires_grad=True)
                for _ in range(num_tensors):
                    hidden = hidden.sin()
            copies.synchronize()
            store.stats()  # the copies out are over, and their memory is let go
            hidden.sum().backward()
            # once ahead, and then by each that is asked for while the one before is in the way
            assert 0 < copies.num_refused - before <= num_tensors // 3


def test_device_full_what_is_asked_for_takes_the_place_of_what_was_copied_back(make_store: MakeStore) -> None:
    content = [torch.arange(1024) + number for number in range(3)]
    with SimulatedCopies(room_bytes=content[0].nbytes) as copies:
        store = make_store(copies=copies, host_bytes="1GiB")
        handles = [store.put(each.clone()) for each in content]
        copies.synchronize()
        store.stats()  # the copies out are over, and their memory is let go
        for handle, expected in zip(handles, content, strict=True):
            assert torch.equal(store.get(handle), expected)
        assert copies.num_refused == 2


def test_device_full_of_what_is_in_use_raises_and_is_there_when_there_is_room(make_store: MakeStore) -> None:
    content = [torch.arange(1024) + number for number in range(2)]
    with SimulatedCopies(room_bytes=content[0].nbytes) as copies:
        store = make_store(copies=copies, host_bytes="1GiB")
        handles = [store.put(each.clone()) for each in content]
        copies.synchronize()
        store.stats()  # the copies out are over, and their memory is let go
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


def test_pack_asks_whether_the_tensors_own_device_captures(
    make_store: MakeStore, copies: SimulatedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr("tierstore.hooks.scope.is_capturing", lambda device: asked.append(device) or True)
    store = make_store(copies=copies)
    weight = torch.randn(64, 64, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = (weight * 2).sin().sum()
    assert asked == [weight.device]
    assert store.stats().kept_bytes["unsupported"] == weight.nbytes
    loss.backward()


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


def test_step_that_went_through_memory_that_was_just_being_pinned_tells_nothing_of_the_link(
    make_store: MakeStore, copies: SimulatedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has to stay on the device is found from a step's times, and never taken back."""
    is_being_pinned = True
    monkeypatch.setattr(Slab, "is_being_pinned", property(lambda slab: is_being_pinned))
    measured: list[bool] = []

    def note(coverage: Coverage, signature: int, times: GraphTimes) -> None:
        measured.append(times.measured() is not None)

    monkeypatch.setattr(Coverage, "note", note)
    store = make_store(copies=copies, host_bytes="1GiB")
    _gradients(store, "auto")
    assert measured
    assert not any(measured)
    is_being_pinned = False
    measured.clear()
    _gradients(store, "auto")
    assert any(measured)


class Noting(TorchDispatchMode):
    """Notes what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


class AtOnce(SimulatedCopies):
    """Copies are made by the caller, as the copy engine for a device queues them."""

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Marker:
        target.copy_(source)
        return self.mark(None)


@pytest.mark.parametrize("is_inside", [False, True])
def test_copies_are_seen_by_what_is_to_check_their_streams(make_store: MakeStore, is_inside: bool) -> None:
    """The store shuts modes out; without this the check on a device would pass whatever the store does."""
    with AtOnce() as plain, AtOnce() as engine:
        unseen, seen, content = Noting(), Noting(), torch.arange(1024)
        for copies, mode in ((plain, unseen), (SeenCopies(engine, seen), seen)):
            store = make_store(copies=copies, host_bytes="1GiB")
            with mode if is_inside else nullcontext():
                handle = store.put(content.clone())
                store.stats()
                got = store.get(handle)
            assert torch.equal(got, content)
        assert (unseen.num_copies, seen.num_copies) == (0, 2)


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
        slab = inspect(store).slab
        monkeypatch.setattr(slab, "unpin", lambda: over.extend(marker.query() for marker in copies.markers))
        with tiered_offload(store, min_bytes=0):
            loss = _model()(torch.randn(32, 64)).sum()
        store.close()
        copies.go.set()
        assert over
        assert all(over)
        del loss

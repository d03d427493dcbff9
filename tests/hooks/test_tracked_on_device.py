"""What stays on an accelerator is only tracked: as safe as a record, and one as soon as something has to leave."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.device.fake import SeenDevice
from tests.gpu.device import make_windows_small
from tests.inspect_store import inspect
from tierstore import TierStore, tiered_offload

_SIDE = 32
_NBYTES = _SIDE * _SIDE * 4


@pytest.fixture
def store(make_store: MakeStore, copies: SeenDevice) -> TierStore:
    return make_store(host_bytes="64MiB", copies=copies)


class _Keep(torch.autograd.Function):
    """Saves a tensor of its own, or several, and multiplies by them. Backward tells `seen` of each request."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factors: Sequence[int], seen: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(*(torch.full((_SIDE, _SIDE), float(factor)) for factor in factors))
        ctx.seen = seen
        return x * torch.tensor(factors).prod()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        result = gradients[0]
        for saved in ctx.saved_tensors:
            result = result * saved[0, 0]
        if ctx.seen is not None:
            ctx.seen()
        return result, None, None


def _chain(length: int, x: torch.Tensor, *, first: int = 1, seen: Any = None) -> torch.Tensor:
    for number in range(length):
        x = _Keep.apply(x, [first + number % 3], seen)
    return x


class _Graph:
    """Scopes with the same `prefetch` share a log, unless backward has begun on it."""

    def __init__(
        self, store: TierStore, length: int, device_bytes: int, seen: Any = None, prefetch: str = "learned"
    ) -> None:
        self.length, self.leaf = length, torch.ones(1, requires_grad=True)
        with tiered_offload(store, min_bytes=_NBYTES, device_bytes=device_bytes, prefetch=prefetch):
            self.result = _chain(length, self.leaf, seen=seen)

    def check(self, **options: bool) -> None:
        """Go backward: the gradient is that without a store."""
        plain = torch.ones(1, requires_grad=True)
        expected = torch.autograd.grad(_chain(self.length, plain), plain)
        assert torch.equal(*torch.autograd.grad(self.result, self.leaf, **options), *expected)


def _num_tracked(store: TierStore) -> int:
    return sum(1 for tracked in inspect(store).tracked if tracked.device is not None)


def test_while_the_device_has_room_no_record_is_made(store: TierStore, copies: SeenDevice) -> None:
    for step in range(3):
        graph = _Graph(store, 6, 6 * _NBYTES)
        assert (_num_tracked(store), inspect(store).records) == (6, [])
        assert inspect(store).devices.held_bytes == 6 * _NBYTES
        if step == 2:  # exact figures register what is tracked
            assert store.stats().device_bytes == 6 * _NBYTES
            assert (_num_tracked(store), len(inspect(store).records)) == (0, 6)
        graph.check()
        del graph
    stats = store.stats()
    assert (stats.device_bytes, stats.live_handles, stats.packed_tensors) == (0, 0, 18)
    assert copies.num_out == 0


def test_shortage_registers_the_log_and_what_was_saved_first_leaves(store: TierStore, copies: SeenDevice) -> None:
    graph = _Graph(store, 10, 6 * _NBYTES)
    assert _num_tracked(store) == 0
    store.stats()
    places = [record.state.name for record in inspect(store).records]
    assert places[-6:] == ["DEVICE"] * 6
    assert "DEVICE" not in places[:4]
    assert copies.num_out == 4
    graph.check()


def test_shortage_of_one_graph_registers_others_too(store: TierStore, copies: SeenDevice) -> None:
    graph = _Graph(store, 4, 4 * _NBYTES)
    other = _Graph(store, 2, 4 * _NBYTES, prefetch="reverse")
    store.stats()
    by_age = sorted(inspect(store).records, key=lambda record: record.key)
    assert [record.state.name for record in by_age][2:] == ["DEVICE"] * 4, "what was saved last stays"
    assert copies.num_out == 2
    graph.check()
    other.check()


def test_shortage_in_the_midst_of_a_node_same_bits(store: TierStore, copies: SeenDevice) -> None:
    """The first of its tensors is tracked, and must not be read before all are saved."""
    for _ in range(3):
        leaf = torch.ones(1, requires_grad=True)
        with tiered_offload(store, min_bytes=_NBYTES, device_bytes=5 * _NBYTES):
            result = leaf
            for _ in range(4):
                result = _Keep.apply(result, [2, 3, 5], None)
            assert inspect(store).devices.window.resident.used_bytes <= 5 * _NBYTES
        result.backward()
        assert torch.equal(leaf.grad, torch.full((1,), 30.0**4))
        del result
    copies.synchronize()
    assert store.stats().device_bytes == 0


def test_dropped_graph_gives_the_room_back(store: TierStore, copies: SeenDevice) -> None:
    for _ in range(3):
        graph = _Graph(store, 6, 6 * _NBYTES)
        assert inspect(store).records == []
        del graph
    assert copies.num_out == 0
    copies.synchronize()
    assert store.stats().device_bytes == 0


@pytest.mark.parametrize("device_bytes", [0, _NBYTES])
def test_less_may_stay_from_now_on_registers_what_is_tracked(
    make_store: MakeStore, copies: SeenDevice, device_bytes: int
) -> None:
    store = make_store(host_bytes="64MiB", staging_bytes=8 * _NBYTES, copies=copies)  # a group takes in none of them
    graph = _Graph(store, 4, 4 * _NBYTES)
    assert _num_tracked(store) == 4
    other = _Graph(store, 2, device_bytes)
    assert inspect(store).device_window.resident.used_bytes <= device_bytes
    store.stats()
    assert copies.num_out >= 5
    graph.check()
    other.check()


def test_copied_from_the_stream_that_packed_and_kept_for_the_one_that_unpacked(
    store: TierStore, copies: SeenDevice
) -> None:
    graph = _Graph(store, 4, 4 * _NBYTES)
    copies.now = 1
    graph.check(retain_graph=True)
    copies.now = 2
    other = _Graph(store, 4, 4 * _NBYTES)
    store.flush()
    assert copies.copied_from == {(0, 0): 4 * _NBYTES}
    copies.synchronize()
    store.stats()
    assert {stream for _, stream in copies.shared} == {0, 1, 2}
    graph.check()
    del other


def test_room_of_tracked_tensors_is_used_to_copy_back_ahead(store: TierStore, copies: SeenDevice) -> None:
    """Backward asks for the 32 that have stayed before it comes to those that have left."""
    make_windows_small(store, _NBYTES)
    num_in: list[int] = []
    for _ in range(3):
        num_in.clear()
        graph = _Graph(store, 64, 32 * _NBYTES, seen=lambda: num_in.append(copies.num_in))
        store.flush()
        before = copies.num_in
        graph.check()
        del graph
    ahead = [number - before for number in num_in]
    assert ahead[20] >= 8
    assert ahead[31] >= 16

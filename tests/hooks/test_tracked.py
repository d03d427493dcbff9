"""What stays on an accelerator is only tracked: as safe as a record, and one as soon as something has to leave."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.gpu.device import make_windows_small
from tests.hooks.programs import forget_after_error
from tests.inspect_store import inspect
from tierstore import ModifiedInPlaceError, StoreClosedError, TierStore, tiered_offload
from tierstore.residency.copies import Marker
from tierstore.testing import SimulatedCopies

_SIDE = 32
_NBYTES = _SIDE * _SIDE * 4


class _Streams(SimulatedCopies):
    """Each thread may work on a stream of its own. Tells what was copied from which stream, and shared with which."""

    def __init__(self) -> None:
        super().__init__()
        self.now = "first"
        self.copied_from: list[Any] = []
        self.shared_with: set[Any] = set()

    def current_stream(self, device: torch.device) -> str:
        return self.now

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> Marker:
        self.copied_from.append(stream)
        return super().copy_out(source, target, stream)

    def share(self, memory: torch.Tensor, stream: Any) -> None:
        self.shared_with.add(stream)


@pytest.fixture
def copies() -> Iterator[_Streams]:
    with _Streams() as engine:
        yield engine


@pytest.fixture
def store(make_store: MakeStore, copies: _Streams) -> TierStore:
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


def _forward(
    store: TierStore, length: int, device_bytes: int, seen: Any = None, prefetch: str = "learned"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scopes with the same `prefetch` share a log, unless backward has begun on it."""
    leaf = torch.ones(1, requires_grad=True)
    with tiered_offload(store, min_bytes=_NBYTES, device_bytes=device_bytes, prefetch=prefetch):
        result = _chain(length, leaf, seen=seen)
    return leaf, result


def _expected(length: int) -> torch.Tensor:
    leaf = torch.ones(1, requires_grad=True)
    _chain(length, leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


def _num_tracked(store: TierStore) -> int:
    return sum(1 for noted in inspect(store).noted if noted.device is not None)


def test_while_the_device_has_room_no_record_is_made(store: TierStore, copies: _Streams) -> None:
    for _ in range(3):
        leaf, result = _forward(store, 6, 6 * _NBYTES)
        assert (_num_tracked(store), inspect(store).records) == (6, [])
        assert inspect(store).devices.held_bytes == 6 * _NBYTES
        result.backward()
        assert torch.equal(leaf.grad, _expected(6))
        del result
    stats = store.stats()
    assert (stats.device_bytes, stats.live_handles, stats.packed_tensors) == (0, 0, 18)
    assert copies.num_out == 0


def test_exact_figures_book_what_is_tracked(store: TierStore) -> None:
    leaf, result = _forward(store, 4, 6 * _NBYTES)
    assert store.stats().device_bytes == 4 * _NBYTES
    assert (_num_tracked(store), len(inspect(store).records)) == (0, 4)
    result.backward()
    assert torch.equal(leaf.grad, _expected(4))


def test_shortage_books_the_log_and_what_was_saved_first_leaves(store: TierStore, copies: _Streams) -> None:
    leaf, result = _forward(store, 10, 6 * _NBYTES)
    assert _num_tracked(store) == 0
    store.stats()
    places = [record.state.name for record in inspect(store).records]
    assert places[-6:] == ["DEVICE"] * 6
    assert "DEVICE" not in places[:4]
    assert copies.num_out == 4
    result.backward()
    assert torch.equal(leaf.grad, _expected(10))


def test_shortage_of_one_graph_books_others_too(store: TierStore, copies: _Streams) -> None:
    leaf, result = _forward(store, 4, 4 * _NBYTES)
    other_leaf, other = _forward(store, 2, 4 * _NBYTES, prefetch="reverse")
    store.stats()
    by_age = sorted(inspect(store).records, key=lambda record: record.key)
    assert [record.state.name for record in by_age][2:] == ["DEVICE"] * 4, "what was saved last stays"
    assert copies.num_out == 2
    result.backward()
    other.backward()
    assert torch.equal(leaf.grad, _expected(4))
    assert torch.equal(other_leaf.grad, _expected(2))


def test_shortage_in_the_midst_of_a_node_same_bits(store: TierStore, copies: _Streams) -> None:
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


def test_known_graph_what_the_plan_leaves_on_the_device_is_tracked(store: TierStore, copies: _Streams) -> None:
    num_out = []
    for step in range(3):
        before = copies.num_out
        leaf, result = _forward(store, 10, 6 * _NBYTES)
        assert (_num_tracked(store), len(inspect(store).records)) == ((6, 4) if step else (0, 10))
        result.backward()
        assert torch.equal(leaf.grad, _expected(10))
        del result
        store.flush()
        num_out.append(copies.num_out - before)
    assert num_out == [4, 4, 4]


def test_broken_plan_same_bits_and_no_more_than_may_stays(store: TierStore, copies: _Streams) -> None:
    for length in (10, 10, 14, 8, 14, 10):
        leaf, result = _forward(store, length, 6 * _NBYTES)
        assert inspect(store).devices.window.resident.used_bytes <= 6 * _NBYTES
        result.backward()
        assert torch.equal(leaf.grad, _expected(length))
        del result
    copies.synchronize()
    assert store.stats().device_bytes == 0


def test_dropped_graph_gives_the_room_back(store: TierStore, copies: _Streams) -> None:
    for _ in range(3):
        _, result = _forward(store, 6, 6 * _NBYTES)
        assert inspect(store).records == []
        del result
    assert copies.num_out == 0
    copies.synchronize()
    assert store.stats().device_bytes == 0


def test_tensors_that_die_before_their_log_give_the_room_back(store: TierStore, copies: _Streams) -> None:
    leaf = torch.ones(1, requires_grad=True)
    with tiered_offload(store, min_bytes=_NBYTES, device_bytes=6 * _NBYTES):
        kept = _chain(2, leaf)
        for _ in range(5):
            _chain(4, leaf)
    assert copies.num_out == 0
    assert _num_tracked(store) == 2
    kept.backward()
    assert torch.equal(leaf.grad, _expected(2))


def test_views_of_one_storage_are_charged_once(store: TierStore, copies: _Streams) -> None:
    weight = torch.rand(_SIDE, _SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=_NBYTES, device_bytes=2 * _NBYTES):
        hidden = weight * 2.0
        loss = (hidden.sin() + hidden.cos() + hidden.t().exp() * hidden.t()).sum()
        del hidden
    assert inspect(store).devices.window.resident.used_bytes <= 2 * _NBYTES
    assert copies.num_out == 0
    (found,) = torch.autograd.grad(loss, weight)
    hidden = weight * 2.0
    plain = (hidden.sin() + hidden.cos() + hidden.t().exp() * hidden.t()).sum()
    assert torch.equal(found, torch.autograd.grad(plain, weight)[0])


@pytest.mark.parametrize("is_booked", [False, True])
def test_edited_in_place_is_noticed(store: TierStore, is_booked: bool) -> None:
    weight = torch.rand(_SIDE, _SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=_NBYTES, device_bytes=2 * _NBYTES):
        hidden = weight * 2.0
        loss = hidden.sin().sum()
        hidden.detach().add_(1)
        del hidden
    assert _num_tracked(store) == 1
    if is_booked:
        store.stats()
    with pytest.raises(ModifiedInPlaceError):
        loss.backward()
    forget_after_error()


def test_somebody_else_holds_it_is_not_the_stores(store: TierStore, copies: _Streams) -> None:
    weight = torch.rand(_SIDE, _SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=_NBYTES, device_bytes=2 * _NBYTES):
        hidden = weight * 2.0
        loss = hidden.sin().sum()
    assert inspect(store).devices.held_bytes == 0, "it is booked at the end of the scope, since another holds it"
    assert inspect(store).records[0].shared
    loss.backward()
    assert torch.equal(weight.grad, 2.0 * (weight.detach() * 2.0).cos())


def test_closed_store_unpack_raises(store: TierStore) -> None:
    _, result = _forward(store, 4, 6 * _NBYTES)
    assert _num_tracked(store) == 4
    store.close()
    assert inspect(store).devices.held_bytes == 0
    with pytest.raises(StoreClosedError):
        result.backward()
    forget_after_error()
    del result
    assert inspect(store).devices.held_bytes == 0


@pytest.mark.parametrize("device_bytes", [0, _NBYTES])
def test_less_may_stay_from_now_on_books_what_is_tracked(store: TierStore, copies: _Streams, device_bytes: int) -> None:
    leaf, result = _forward(store, 4, 4 * _NBYTES)
    assert _num_tracked(store) == 4
    other_leaf, other = _forward(store, 2, device_bytes)
    assert inspect(store).device_window.resident.used_bytes <= device_bytes
    store.stats()
    assert copies.num_out >= 5
    result.backward()
    other.backward()
    assert torch.equal(leaf.grad, _expected(4))
    assert torch.equal(other_leaf.grad, _expected(2))


def test_copied_from_the_stream_that_packed_and_kept_for_the_one_that_unpacked(
    store: TierStore, copies: _Streams
) -> None:
    leaf, result = _forward(store, 4, 4 * _NBYTES)
    copies.now = "second"
    result.backward(retain_graph=True)
    copies.now = "third"
    _, other = _forward(store, 4, 4 * _NBYTES)
    store.flush()
    assert copies.copied_from == ["first"] * 4
    copies.synchronize()
    store.stats()
    assert copies.shared_with == {"first", "second", "third"}
    leaf.grad = None
    result.backward()
    assert torch.equal(leaf.grad, _expected(4))
    del other


def test_room_of_tracked_tensors_is_used_to_copy_back_ahead(store: TierStore, copies: _Streams) -> None:
    """Backward asks for the 32 that have stayed before it comes to those that have left."""
    make_windows_small(store, _NBYTES)
    num_in: list[int] = []
    for _ in range(3):
        num_in.clear()
        leaf, result = _forward(store, 64, 32 * _NBYTES, seen=lambda: num_in.append(copies.num_in))
        store.flush()
        before = copies.num_in
        result.backward()
        assert torch.equal(leaf.grad, _expected(64))
        del result
    ahead = [number - before for number in num_in]
    assert ahead[20] >= 8
    assert ahead[31] >= 16


def test_threads_that_track_and_ask_at_once_same_bits(store: TierStore, copies: _Streams) -> None:
    failed: list[BaseException] = []

    def train() -> None:
        try:
            for number in range(12):
                length = 4 + number % 5
                leaf, result = _forward(store, length, 12 * _NBYTES)
                result.backward()
                assert torch.equal(leaf.grad, _expected(length))
        except BaseException as error:  # noqa: BLE001 - told to the test
            failed.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    copies.synchronize()
    assert store.stats().device_bytes == 0


def test_traced_scope_books_each_tensor(store: TierStore, tmp_path: Any) -> None:
    leaf = torch.ones(1, requires_grad=True)
    with tiered_offload(store, min_bytes=_NBYTES, device_bytes=6 * _NBYTES, trace=tmp_path / "trace"):
        result = _chain(4, leaf)
    assert (_num_tracked(store), len(inspect(store).records)) == (0, 4)
    result.backward()
    assert torch.equal(leaf.grad, _expected(4))

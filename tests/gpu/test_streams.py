"""Races: each stream that could be too early or too late is held up, and the bits must be the same.

`tests/store/test_happens_before.py` looks at the same waits without a device, and without luck.
"""

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from tests.conftest import MakeStore
from tests.gpu.device import (
    DEVICE,
    NEEDS_DEVICE,
    copies_under_test,
    copy_stream,
    hold_up,
    make_windows_small,
)
from tests.inspect_store import inspect
from tierstore import TierStore, tiered_offload

pytestmark = NEEDS_DEVICE

WIDTH = 512
"""Of square matrices: 1 MiB of float32, so the allocator gives each block again at once."""
DELAY_SECONDS = 0.05


def _chain(weights: list[torch.Tensor], between: Callable[[int], object]) -> torch.Tensor:
    hidden = weights[0]
    for number, weight in enumerate(weights):
        hidden = (hidden * weight).tanh()
        between(number)
        torch.full((WIDTH, WIDTH), float("nan"), device=DEVICE)  # over whatever block was freed too early
    return hidden.sum()


def _gradients(store: TierStore | None, between: Callable[[int], object] = lambda _: None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, device=DEVICE, requires_grad=True) for _ in range(24)]
    with nullcontext() if store is None else tiered_offload(store, min_bytes=0):
        loss = _chain(weights, between)
    return list(torch.autograd.grad(loss, weights))


def _assert_same(store: TierStore, between: Callable[[int], object] = lambda _: None) -> None:
    expected = _gradients(None)
    for _ in range(3):
        found = _gradients(store, between)
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert store.stats().reloaded_bytes > 0


@pytest.fixture
def small_flight(make_store: MakeStore) -> TierStore:
    """A store that waits for copies often: little may be in flight."""
    store = make_store(host_bytes="1GiB", copies=copies_under_test())
    make_windows_small(store, 4 * 2**20)
    inspect(store).slab.pin(DEVICE)  # the host waits for copies to pageable memory, and nothing is late
    return store


@pytest.mark.parametrize("late", ["out", "in", "compute"])
def test_stream_that_is_late_same_bits(small_flight: TierStore, late: str) -> None:
    stream = torch.accelerator.current_stream(DEVICE) if late == "compute" else copy_stream(small_flight, late)
    _assert_same(small_flight, lambda number: number % 6 or hold_up(DELAY_SECONDS, stream))


def test_forward_on_a_stream_of_the_users_same_bits(small_flight: TierStore) -> None:
    """Backward then runs on that stream too, on autograd's thread for the device."""
    side = torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        _assert_same(small_flight, lambda number: number % 6 or hold_up(DELAY_SECONDS))


def test_computed_on_one_stream_and_packed_on_another_same_bits(small_flight: TierStore) -> None:
    """The block belongs to a stream that the store never sees, and which goes on at once."""
    maker, user = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)

    def gradients(store: TierStore | None) -> torch.Tensor:
        weight = torch.linspace(-1, 1, WIDTH * WIDTH, device=DEVICE).view(WIDTH, WIDTH).requires_grad_()
        torch.cuda.synchronize()
        losses = []
        with nullcontext() if store is None else tiered_offload(store, min_bytes=0):
            for number in range(16):
                with torch.cuda.stream(maker):
                    made = torch.full((WIDTH, WIDTH), float(number), device=DEVICE)
                user.wait_stream(maker)
                with torch.cuda.stream(user):
                    hold_up(DELAY_SECONDS / 10)
                    losses.append((weight * made).sin().sum())
                del made
        maker.wait_stream(user)
        torch.cuda.current_stream(DEVICE).wait_stream(user)
        return torch.autograd.grad(torch.stack(losses).sum(), weight)[0]

    expected = gradients(None)
    for _ in range(3):
        found = gradients(small_flight)
        torch.cuda.synchronize()
        assert torch.equal(found, expected)


def test_one_record_asked_for_on_two_streams_both_find_it(small_flight: TierStore) -> None:
    """Prefetched for one stream, asked for on another first."""
    content = torch.arange(WIDTH * WIDTH, device=DEVICE)
    handles = [small_flight.put(content + number) for number in range(4)]
    small_flight.flush()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(DEVICE) for _ in range(2)]
    sums = []
    for number, handle in enumerate(handles):
        hold_up(DELAY_SECONDS, copy_stream(small_flight, "in"))
        for stream in streams:
            with torch.cuda.stream(stream):
                sums.append((small_flight.get(handle).sum(), int(content.sum()) + number * WIDTH * WIDTH))
    torch.cuda.synchronize()
    assert all(int(found) == expected for found, expected in sums)


@pytest.mark.parametrize("seed", range(8))
def test_any_delays_on_all_streams_same_bits(small_flight: TierStore, seed: int) -> None:
    chance = random.Random(seed)
    streams = [copy_stream(small_flight, "out"), copy_stream(small_flight, "in"), None]

    def between(number: int) -> None:
        if chance.random() < 0.3:
            hold_up(chance.random() * DELAY_SECONDS, chance.choice(streams))

    _assert_same(small_flight, between)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two devices")
def test_two_devices_in_one_graph_same_bits(small_flight: TierStore) -> None:
    def gradient(store: TierStore | None) -> torch.Tensor:
        weight = torch.linspace(-1, 1, WIDTH * WIDTH, device=DEVICE).view(WIDTH, WIDTH).requires_grad_()
        with nullcontext() if store is None else tiered_offload(store, min_bytes=0):
            hidden = weight
            for number in range(8):
                hidden = (hidden.to(torch.device("cuda", number % 2)) * 1.5).sin()
            loss = hidden.sum()
        return torch.autograd.grad(loss, weight)[0]

    assert torch.equal(gradient(small_flight), gradient(None))

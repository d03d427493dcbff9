"""How long steps take, in virtual time, where some of what they save leaves an accelerator."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.virtual_accelerator import VirtualAccelerator, forward_through
from tests.inspect_store import inspect
from tierstore import ConfigError, TierStore, tiered_offload
from tierstore.residency import graph_times, residency
from tierstore.residency.device import DeviceTier

NUM_LAYERS = 128
LAYER_BYTES = 256 * 1024
SAVED_BYTES = NUM_LAYERS * LAYER_BYTES
FLIGHT_BYTES = SAVED_BYTES // 16
LAYER_SECONDS = 0.01


class Step(NamedTuple):
    """Seconds of a step, and the bytes that left the device."""

    forward: float
    backward: float
    out_bytes: int


FORWARD_SECONDS, BACKWARD_SECONDS = NUM_LAYERS * LAYER_SECONDS, 2 * NUM_LAYERS * LAYER_SECONDS


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of the size that they have beside a real model's saved tensors, without its gigabytes."""
    small = partial(DeviceTier, flight_bytes=FLIGHT_BYTES, reload_bytes=FLIGHT_BYTES)
    monkeypatch.setattr(residency, "DeviceTier", small)
    monkeypatch.setattr(graph_times, "perf_counter", lambda: 0.0)  # the host takes no time


def _step(
    store: TierStore, engine: VirtualAccelerator, device_bytes: int | str, layer_bytes: int = LAYER_BYTES
) -> Step:
    start = torch.zeros(layer_bytes // 4, requires_grad=True)
    began, out_bytes = engine.synchronize(), engine.out_bytes
    with tiered_offload(store, min_bytes=0, device_bytes=device_bytes):
        loss = forward_through(engine, [LAYER_SECONDS] * NUM_LAYERS, start).sum()
    forward = engine.compute.seconds
    loss.backward()
    return Step(forward - began, engine.compute.seconds - forward, engine.out_bytes - out_bytes)


def _engine(covered: float, **options: Any) -> VirtualAccelerator:
    """A link that carries such a part of what forward saves while forward runs."""
    return VirtualAccelerator(covered * SAVED_BYTES / FORWARD_SECONDS, **options)


@pytest.mark.parametrize("covered", [0.25, 0.75])
def test_known_graph_what_compute_covers_costs_no_time(make_store: MakeStore, covered: float) -> None:
    """The link carries a part of what forward saves while forward runs, and so much leaves: nothing waits for it.

    It leaves in the first part of forward, faster than the link carries; so the rest of `device_bytes` has to be lent.
    """
    engine = _engine(covered)
    store = make_store(host_bytes="1GiB", copies=engine)
    device_bytes = int((1 - covered) * SAVED_BYTES)
    for _ in range(2):
        step = _step(store, engine, device_bytes)
    assert step.out_bytes == SAVED_BYTES - device_bytes
    assert step.forward <= 1.03 * FORWARD_SECONDS
    assert step.backward <= 1.03 * BACKWARD_SECONDS


@pytest.mark.parametrize("covered", [0.2, 0.8])
def test_auto_finds_what_compute_covers(make_store: MakeStore, covered: float) -> None:
    """From the third step on nothing waits, and as much leaves as the link carries, or more."""
    engine = _engine(covered)
    store = make_store(host_bytes="1GiB", copies=engine)
    steps = [_step(store, engine, "auto") for _ in range(6)]
    assert steps[1].forward > 1.1 * FORWARD_SECONDS, "nothing to find"
    for step in steps[2:]:
        assert step.forward <= 1.03 * FORWARD_SECONDS
        assert step.backward <= 1.03 * BACKWARD_SECONDS
        assert covered * SAVED_BYTES <= step.out_bytes < SAVED_BYTES
    stays_bytes = SAVED_BYTES - steps[-1].out_bytes
    assert stays_bytes <= store.stats().device_limit_bytes < stays_bytes + LAYER_BYTES


def test_auto_what_stays_has_no_record(make_store: MakeStore) -> None:
    engine = _engine(0.5)
    store = make_store(host_bytes="1GiB", copies=engine)
    for _ in range(4):
        _step(store, engine, "auto")
    offloaded_bytes = store.stats().offloaded_bytes
    with tiered_offload(store, min_bytes=0, device_bytes="auto"):
        start = torch.zeros(LAYER_BYTES // 4, requires_grad=True)
        loss = forward_through(engine, [LAYER_SECONDS] * NUM_LAYERS, start).sum()
    num_records = len(inspect(store).records)  # before `stats`, which makes one of each tensor
    num_left = (store.stats().offloaded_bytes - offloaded_bytes) // LAYER_BYTES
    assert 0 < num_records == num_left < NUM_LAYERS
    loss.backward()


def test_auto_link_that_is_slow_on_the_way_back_finds_what_backward_covers(make_store: MakeStore) -> None:
    engine = _engine(2, back_bytes_per_second=0.5 * SAVED_BYTES / BACKWARD_SECONDS)
    store = make_store(host_bytes="1GiB", copies=engine)
    steps = [_step(store, engine, "auto") for _ in range(6)]
    assert steps[1].backward > 1.1 * BACKWARD_SECONDS, "nothing to find"
    for step in steps[2:]:
        assert step.forward <= 1.03 * FORWARD_SECONDS
        assert step.backward <= 1.03 * BACKWARD_SECONDS
        assert 0.5 * SAVED_BYTES <= step.out_bytes < SAVED_BYTES


def test_auto_another_graph_nothing_stays_until_it_is_known(make_store: MakeStore) -> None:
    engine = _engine(0.5)
    store = make_store(host_bytes="1GiB", copies=engine)
    for _ in range(3):
        _step(store, engine, "auto")
    found = store.stats().device_limit_bytes
    assert found > 0
    other = _step(store, engine, "auto", layer_bytes=LAYER_BYTES // 2)
    assert store.stats().device_limit_bytes == 0
    assert other.out_bytes == SAVED_BYTES // 2
    _step(store, engine, "auto")
    assert store.stats().device_limit_bytes == found


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_auto_graph_that_another_came_into_tells_nothing(make_store: MakeStore, when: str) -> None:
    """Its times would be the other's."""
    engine = _engine(0.5)
    store = make_store(host_bytes="1GiB", copies=engine)
    start = torch.zeros(LAYER_BYTES // 4, requires_grad=True)

    def another(_: object = None) -> None:
        inner = tiered_offload(store, min_bytes=0, device_bytes="auto", lookahead_bytes="1GiB")  # a graph of its own
        with torch.enable_grad(), inner:
            forward_through(engine, [LAYER_SECONDS], start[:-1]).sum().backward()

    for _ in range(4):
        engine.synchronize()
        with tiered_offload(store, min_bytes=0, device_bytes="auto"):
            hidden = forward_through(engine, [LAYER_SECONDS] * (NUM_LAYERS // 2), start)
            assert store.stats().device_limit_bytes == 0
            if when == "forward":
                another()
            else:
                hidden.register_hook(another)
            loss = forward_through(engine, [LAYER_SECONDS] * (NUM_LAYERS // 2), hidden).sum()
        loss.backward()
        del hidden, loss


def test_auto_host_that_is_ahead_of_its_device_finds_it_from_an_earlier_step(make_store: MakeStore) -> None:
    """The second step, the first of a known graph, is over when the third has been queued in part."""
    engine = _engine(0.5)
    store = make_store(host_bytes="1GiB", copies=engine)
    start = torch.zeros(LAYER_BYTES // 4, requires_grad=True)
    for number in range(4):
        with tiered_offload(store, min_bytes=0, device_bytes="auto"):
            loss = forward_through(engine, [LAYER_SECONDS] * NUM_LAYERS, start).sum()
        assert (store.stats().device_limit_bytes > 0) is (number == 3)
        if number == 2:
            engine.synchronize()
        loss.backward()
        del loss


def test_auto_without_learning_is_refused(store: TierStore) -> None:
    for prefetch in ("none", "reverse"):
        with pytest.raises(ConfigError, match="learned"):
            tiered_offload(store, device_bytes="auto", prefetch=prefetch)

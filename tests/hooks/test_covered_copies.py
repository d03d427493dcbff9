"""How long steps take, in virtual time, where some of what they save leaves an accelerator."""

from typing import Any, NamedTuple

import pytest
import torch

from tests.conftest import MakeStore
from tests.device.timed import TimedDevice, forward_through, narrow_windows
from tests.existing import set_existing
from tests.inspect_store import inspect
from tierstore import ConfigError, TierStore, tiered_offload

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
    narrow_windows(monkeypatch, FLIGHT_BYTES)


def _step(store: TierStore, engine: TimedDevice, device_bytes: int | str, layer_bytes: int = LAYER_BYTES) -> Step:
    start = torch.zeros(layer_bytes // 4, requires_grad=True)
    engine.synchronize()
    began, out_bytes = engine.host_seconds, engine.out_bytes
    with tiered_offload(store, min_bytes=0, device_bytes=device_bytes):
        seconds = LAYER_SECONDS * layer_bytes / LAYER_BYTES
        loss = forward_through(engine, [seconds] * NUM_LAYERS, start).sum()
    forward = engine.compute.seconds
    loss.backward()
    return Step(forward - began, engine.compute.seconds - forward, engine.out_bytes - out_bytes)


def _engine(covered: float, **options: Any) -> TimedDevice:
    """A link that carries such a part of what forward saves while forward runs."""
    return TimedDevice(covered * SAVED_BYTES / FORWARD_SECONDS, **options)


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


def test_auto_once_it_is_found_few_steps_are_marked_and_a_slower_link_is_noticed(make_store: MakeStore) -> None:
    engine = _engine(0.5)
    store = make_store(host_bytes="1GiB", copies=engine)
    for _ in range(8):
        out_bytes = _step(store, engine, "auto").out_bytes
    before = engine.num_marks
    for _ in range(20):
        _step(store, engine, "auto")
    assert engine.num_marks == before
    engine.slow_down(2)
    steps = [_step(store, engine, "auto") for _ in range(40)]
    assert steps[0].forward > 1.1 * FORWARD_SECONDS, "nothing to find"
    assert steps[-1].forward <= 1.03 * FORWARD_SECONDS
    assert steps[-1].out_bytes < 0.6 * out_bytes


def test_auto_what_stays_has_no_record(make_store: MakeStore) -> None:
    engine = _engine(0.5)
    store = make_store(host_bytes="1GiB", copies=engine)
    for _ in range(4):
        _step(store, engine, "auto")
    offloaded_bytes = store.stats().offloaded_bytes
    with tiered_offload(store, min_bytes=0, device_bytes="auto"):
        start = torch.zeros(LAYER_BYTES // 4, requires_grad=True)
        loss = forward_through(engine, [LAYER_SECONDS] * NUM_LAYERS, start).sum()
    num_registered = sum(record.num_members for record in inspect(store).records)  # before `stats`, which registers all
    num_left = (store.stats().offloaded_bytes - offloaded_bytes) // LAYER_BYTES
    assert 0 < num_registered == num_left < NUM_LAYERS
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


class _FullDevice(TimedDevice):
    """What stays and what is on its way out takes room too."""

    store: TierStore

    def _taken_bytes(self) -> int:
        devices = inspect(self.store).devices
        return devices.held_bytes + devices.window.reloaded.used_bytes


def test_auto_device_that_refuses_copies_back_keeps_less_from_then_on(make_store: MakeStore) -> None:
    """The link covers a fifth, so four fifths would stay; the device has memory for two."""
    engine = _FullDevice(0.2 * SAVED_BYTES / FORWARD_SECONDS)
    room_bytes = SAVED_BYTES * 2 // 5
    set_existing(engine, _room_bytes=room_bytes)
    engine.store = store = make_store(host_bytes="1GiB", copies=engine)
    limits, refused = [], []
    for _ in range(12):
        before = engine.num_refused
        _step(store, engine, "auto")
        limits.append(store.stats().device_limit_bytes)
        refused.append(engine.num_refused - before)
    assert max(refused) > 0, "nothing to find"
    assert not any(refused[-4:])
    assert 0 < limits[-1] < room_bytes
    assert limits[-4:] == [limits[-1]] * 4


def test_auto_another_graph_nothing_stays_until_it_is_known(make_store: MakeStore) -> None:
    engine = _engine(0.5)
    store = make_store(host_bytes="1GiB", copies=engine)
    for _ in range(3):
        _step(store, engine, "auto")
    found = store.stats().device_limit_bytes
    assert found > 0
    out_bytes = engine.out_bytes
    with tiered_offload(store, min_bytes=0, device_bytes="auto"):
        hidden = forward_through(engine, [LAYER_SECONDS], torch.zeros(LAYER_BYTES // 8, requires_grad=True))
        for _ in range(1, NUM_LAYERS):
            hidden = forward_through(engine, [LAYER_SECONDS], hidden + 1)
    assert store.stats().device_limit_bytes == 0
    hidden.sum().backward()
    del hidden
    left_bytes = engine.out_bytes - out_bytes
    assert left_bytes >= (SAVED_BYTES - LAYER_BYTES) // 2, "the first node alone tells no graph from another"
    _step(store, engine, "auto")
    assert store.stats().device_limit_bytes == found


@pytest.mark.parametrize(("covered", "most"), [(0.2, 1.1), (0.5, 1.02)])
def test_auto_each_step_of_new_sizes_the_share_that_was_found_stays(
    make_store: MakeStore, covered: float, most: float
) -> None:
    """The nodes are the same, as with sequences of other lengths; compute takes longer as there is more to save."""
    engine = _engine(covered)
    store = make_store(host_bytes="1GiB", copies=engine)
    for _ in range(6):
        known = _step(store, engine, "auto")
    steps = []
    for number in range(12):
        layer_bytes = LAYER_BYTES * (4 + 5 * number % 12) // 16 + 64 * number
        steps.append((layer_bytes / LAYER_BYTES, _step(store, engine, "auto", layer_bytes)))
    for scale, step in steps:
        seconds = scale * (FORWARD_SECONDS + BACKWARD_SECONDS)
        assert step.forward + step.backward <= most * seconds
        assert step.out_bytes >= 0.8 * scale * known.out_bytes, "more stays than of the known one"


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

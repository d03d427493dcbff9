"""How long steps take, in virtual time, where some of what they save leaves an accelerator."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.virtual_accelerator import VirtualAccelerator, forward_through
from tierstore import TierStore, moves, tiered_offload
from tierstore.device import DeviceTier

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
    monkeypatch.setattr(moves, "DeviceTier", small)


def _step(store: TierStore, engine: VirtualAccelerator, device_bytes: int) -> Step:
    start = torch.zeros(LAYER_BYTES // 4, requires_grad=True)
    began, out_bytes = engine.synchronize(), engine.out_bytes
    with tiered_offload(store, min_bytes=0, device_bytes=device_bytes):
        loss = forward_through(engine, [LAYER_SECONDS] * NUM_LAYERS, start).sum()
    forward = engine.compute.seconds
    loss.backward()
    return Step(forward - began, engine.compute.seconds - forward, engine.out_bytes - out_bytes)


@pytest.mark.parametrize("covered", [0.25, 0.5, 0.75])
def test_known_graph_what_compute_covers_costs_no_time(make_store: MakeStore, covered: float) -> None:
    """The link carries a part of what forward saves while forward runs, and so much leaves: nothing waits for it.

    It leaves in the first part of forward, faster than the link carries; so the rest of `device_bytes` has to be lent.
    """
    engine = VirtualAccelerator(bytes_per_second=covered * SAVED_BYTES / FORWARD_SECONDS)
    store = make_store(host_bytes="1GiB", copies=engine)
    device_bytes = int((1 - covered) * SAVED_BYTES)
    for _ in range(2):
        step = _step(store, engine, device_bytes)
    assert step.out_bytes == SAVED_BYTES - device_bytes
    assert step.forward <= 1.03 * FORWARD_SECONDS
    assert step.backward <= 1.03 * BACKWARD_SECONDS


@pytest.mark.parametrize("covered", [0.1, 0.4])
def test_everything_leaves_a_step_takes_as_long_as_the_link(make_store: MakeStore, covered: float) -> None:
    engine = VirtualAccelerator(bytes_per_second=covered * SAVED_BYTES / FORWARD_SECONDS)
    store = make_store(host_bytes="1GiB", copies=engine)
    for _ in range(2):
        step = _step(store, engine, 0)
    link_seconds = FORWARD_SECONDS / covered
    assert step.out_bytes == SAVED_BYTES
    assert step.forward <= 1.03 * link_seconds
    assert step.backward <= 1.1 * max(link_seconds, BACKWARD_SECONDS)

"""Two hundred steps: nothing grows."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from tests.conftest import MakeStore
from tests.descriptors import descriptors_of
from tests.hooks.programs import MODELS
from tierstore import tiered_offload

NUM_STEPS = 200


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "auto"])
def test_two_hundred_steps_nothing_grows(make_store: MakeStore, codec: str) -> None:
    """512 KiB are saved in each of six tensors a step: kept for good, they would add 600 MiB."""
    store = make_store(codec=codec, host_bytes="1MiB", staging_bytes="2MiB", disk_bytes="64MiB")
    weight = torch.randn(512, 256, requires_grad=True)
    make, shape = MODELS["transformer"]
    model = make()

    def step(number: int) -> None:
        with tiered_offload(store, min_bytes=0):
            hidden = weight
            for _ in range(6):
                hidden = (hidden * 1.01).tanh()
            loss = hidden.sum() + model(torch.randn(shape))
        if number % 5:  # every fifth graph is dropped
            loss.backward()
        weight.grad = None

    for number in range(30):
        step(number)
    store.flush()
    gc.collect()
    before = resident_bytes(), len(descriptors_of()), threading.active_count()
    for number in range(NUM_STEPS):
        step(number)
    store.flush()
    gc.collect()
    after = resident_bytes(), len(descriptors_of()), threading.active_count()
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 48 * 2**20
    stats = store.stats()
    assert (stats.live_handles, stats.host_bytes, stats.disk_bytes, stats.lent_bytes) == (0, 0, 0, 0)
    assert stats.disk_bytes_peak < 16 * 2**20
    assert stats.spilled_bytes > 100 * 2**20

"""Tuning a step on a real device: does all of it run there, and is what it writes used?"""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.gpu.device import DEVICE, NEEDS_DEVICE
from tierstore import TierStore, tiered_offload
from tierstore.tuning import tune_loop

pytestmark = NEEDS_DEVICE

WIDTH, ROWS, LAYERS = 1024, 4096, 24
SAVED_BYTES = LAYERS * ROWS * WIDTH * 4


@pytest.mark.timeout(400)  # some thirty trials, each of which pins its slab
def test_step_on_a_device_is_tuned_and_keeps_its_device_bytes(tmp_path: Path, store_directory: Path) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model, batch = nn.Sequential(*layers).to(DEVICE), torch.randn(ROWS, WIDTH, device=DEVICE)

    def step(scope: tiered_offload) -> None:
        model.zero_grad()
        with scope:
            loss = model(batch).square().mean()
        loss.backward()

    kept_bytes = SAVED_BYTES // 2
    tuned = tune_loop(step, store_directory, host_bytes="512MiB", device_bytes=kept_bytes, steps=3, rounds=3)
    assert tuned.candidates[0].failure is None
    assert tuned.config["offload"]["device_bytes"] == kept_bytes
    file = tmp_path / "tierstore.toml"
    file.write_text(tuned.toml)
    torch.cuda.synchronize()
    with TierStore.from_config(file) as store:
        step(tiered_offload.from_config(store, file))

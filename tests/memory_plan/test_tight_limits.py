"""Models whose planning itself comes close to the limit: the guard stores what it can in the middle of forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses

from tests.conftest import MakeStore
from tests.hooks.programs import all_bits
from tests.processes import output_of
from tierstore import tiered_offload
from tierstore.memory_plan.meter import MemoryGuard, ResidentMeter

LIMIT_BYTES = 2**40


class OneByteShort(ResidentMeter):
    """Nothing fits until something is stored."""

    is_tidy = False

    def level(self) -> int:
        level, self.is_tidy = 0 if self.is_tidy else LIMIT_BYTES, False
        return level


@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
@pytest.mark.parametrize("side", [200, 600], ids=["small tensors", "large tensors"])
def test_guard_stores_before_each_operator_same_bits(make_store: MakeStore, side: int, host_bytes: object) -> None:
    """Dropout saves its noise after two changes in place, and nothing has changed it since."""
    store, meter = make_store(host_bytes=host_bytes, staging_bytes="32MiB"), OneByteShort()
    weight = torch.randn(side, side, requires_grad=True)

    def gradient() -> torch.Tensor:
        torch.manual_seed(0)
        hidden = weight
        for _ in range(3):
            hidden = F.relu(F.dropout(hidden.sin(), 0.5) + weight, inplace=True)
        (found,) = torch.autograd.grad(hidden.square().sum(), weight)
        return found

    def store_all() -> None:
        store.flush()
        meter.is_tidy = True

    expected = all_bits([gradient()])
    with tiered_offload(store, min_bytes=0), MemoryGuard(meter, LIMIT_BYTES, store_all):
        assert all_bits([gradient()]) == expected


U_NET = """
import copy, sys, torch, torch._dynamo  # which takes memory when a plan loads it
from torch import nn
from torch.nn import functional as F
from tierstore import TierStore, plan_memory
from tierstore.memory_plan.meter import ResidentMeter

def pair(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True), nn.Dropout(0.1),
        nn.Conv2d(after, after, 1), nn.ReLU(), nn.Dropout(0.1),
    )

class UNet(nn.Module):
    def __init__(self, width=8, num_pairs=3):
        super().__init__()
        widths = [width] * (num_pairs - 1)
        self.down, self.middle = nn.Sequential(*(pair(before, width) for before in (3, *widths))), pair(width, width)
        self.up = nn.Sequential(*(pair(before, width) for before in (2 * width, *widths)))

    def forward(self, pictures):
        skipped = self.down(pictures)
        middle = self.middle(F.max_pool2d(skipped, 2))
        return self.up(torch.cat([skipped, F.interpolate(middle, scale_factor=2.0)], 1))

def trained(model):
    torch.manual_seed(2)
    for _ in range(2):
        loss_of(model).backward()
    return [parameter.grad for parameter in model.parameters()] + list(model.buffers())

torch.set_num_threads(1)
model, pictures, meter = UNet(), torch.randn(4, 3, 128, 128), ResidentMeter()
loss_of = lambda model: model(pictures).square().mean()
expected = trained(copy.deepcopy(model))
meter.tidy()
with TierStore(sys.argv[1], codec="none", staging_bytes="32MiB") as store:
    plan = plan_memory(model, lambda: loss_of(model), store, limit=meter.level() + LIMIT_MIB * 2**20)
    found = trained(plan.apply(model))
    plan.remove(model)
assert plan.is_needed
assert plan.predicted.peak_bytes <= plan.limit_bytes
assert all(map(torch.equal, found, expected))
print(plan.num_steps)
"""


@pytest.mark.slow
def test_model_with_dropout_is_planned_while_the_guard_stores_in_the_middle_of_forward(tmp_path: Path) -> None:
    """In a process of its own, with the product's defaults: 140 MiB are saved, and there is room for 100."""
    script = U_NET.replace("LIMIT_MIB", "100")
    assert int(output_of(script, tmp_path)) <= 20

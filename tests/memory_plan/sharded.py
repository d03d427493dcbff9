"""A program: two processes try to plan a model that FSDP2 shards. Then in one process each action around its blocks
gives the plain gradients' bits.

`python -m tests.memory_plan.sharded DIRECTORY [cpu | cuda]`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.memory_plan.blocks import KEEP, RECOMPUTE, RECOMPUTE_STORED, STORE, with_action
from tierstore import ConfigError, TierStore, plan_memory


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + self.layers(batch)


def loss_of(model: nn.Module, device: str) -> torch.Tensor:
    return model(torch.randn(32, 64, device=device)).square().sum()  # type: ignore[no-any-return]


def loss_of_two(model: nn.Module, device: str) -> torch.Tensor:
    with torch.no_grad():
        loss_of(model, device)
    return loss_of(model, device) + loss_of(model, device)


def step(model: nn.Module, device: str) -> Sequence[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss_of(model, device).backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.full_tensor().clone() for parameter in model.parameters()]  # type: ignore[union-attr,operator]


def main(directory: str, device: str = "cpu") -> None:
    store_of_ranks = dist.HashStore()
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=store_of_ranks, rank=0, world_size=1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    plain = step(model, device)
    with TierStore(directory, host_bytes=0, staging_bytes=0) as store:
        for action in (KEEP, STORE, RECOMPUTE, RECOMPUTE_STORED):
            with with_action(model, "012", action, [], store):
                planned = [step(model, device), step(model, device)][-1]
            same = all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))
            print(f"{action}: {'same bits' if same else 'OTHER BITS'}, {store.stats().live_handles} handles")
        print(f"stored: {store.stats().packed_tensors > 0}")
        plan = plan_memory(model, lambda: loss_of_two(model, device), store=store, limit="64GiB")
        print(f"calls of the model in a step: {plan._contents.num_calls}")
        print(f"saved by each block: {plan.blocks[0].saved_bytes} bytes")
        print(f"not computed again: {[block.differs for block in plan.blocks if block.differs]}")
    dist.destroy_process_group()


def refused(directory: str) -> None:
    child = os.fork()
    number = 1 if child else 0
    dist.init_process_group("gloo", init_method=f"file://{directory}.ranks", rank=number, world_size=2)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        fully_shard(block)
    with TierStore(directory, host_bytes=0) as store:
        try:
            plan_memory(model, lambda: loss_of(model, "cpu"), store=store, limit="64GiB")
        except ConfigError as error:
            print(f"refused: {'exchange data between ranks' in str(error)}\n", end="", flush=True)
    dist.destroy_process_group()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    refused(sys.argv[1])
    main(*sys.argv[1:])

"""A program: a model that FSDP2 shards, one process; each action around its blocks gives the plain gradients' bits.

`python -m tests.memory_plan.sharded DIRECTORY [cpu | cuda]`; with `refused` two processes try to plan such a model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.fsdp import fully_shard

from tierstore import ConfigError, TierStore, plan_memory
from tierstore.hooks.module import ModuleScope
from tierstore.memory_plan.applied import PlannedCalls
from tierstore.memory_plan.menu import Action, BlockTraits
from tierstore.memory_plan.steps import with_calls

ACTIONS = Action("keep"), Action("store"), Action("recompute"), Action("recompute", stores=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + self.layers(batch)


def loss_of(model: nn.Module, device: str) -> torch.Tensor:
    return model(torch.randn(32, 64, device=device)).square().sum()  # type: ignore[no-any-return]


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
    with TierStore(directory, host_bytes=0) as store:
        for action in ACTIONS:
            scope = ModuleScope(store, min_bytes=0)
            calls = {name: PlannedCalls(action, BlockTraits(), scope if action.uses_store else None) for name in "012"}
            with with_calls(model, calls):
                planned = [step(model, device), step(model, device)][-1]
            same = all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))
            print(f"{action}: {'same bits' if same else 'OTHER BITS'}, {store.stats().live_handles} handles")
        print(f"stored: {store.stats().packed_tensors > 0}")
        plan = plan_memory(model, lambda: loss_of(model, device), store=store, limit="64GiB")
        print(f"saved by each block: {plan.blocks[0].saved_bytes} bytes")
        print(f"not computed again: {[block.differs for block in plan.blocks if block.differs]}")
    dist.destroy_process_group()


def refused(number: int, directory: str) -> None:
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


if __name__ == "__main__":
    if sys.argv[2:] == ["refused"]:
        multiprocessing.spawn(refused, (sys.argv[1],), nprocs=2)
    else:
        main(*sys.argv[1:])

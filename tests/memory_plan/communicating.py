"""A program: two processes plan a model whose blocks exchange data.

`communicating DIRECTORY limits`: they have other limits, and train under the plan. Half of the blocks are sharded by
FSDP2 over both, so that their parameters are gathered when a block is computed again.

`communicating DIRECTORY blocks`: they have other blocks; then a block computes other bits each time, in one of them.
"""

from __future__ import annotations

import faulthandler
import itertools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.memory_plan.planned_model import Block, far_above
from tierstore import ConfigError, MemoryPlan, TierStore, plan_memory


class Summed(nn.Module):
    """The ranks exchange what a block computes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + all_reduce(self.block(batch), "sum", group=dist.group.WORLD).tanh()


class Unequal(Summed):
    """Computes other bits each time, in the second rank alone."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch) + next(_CALLS) * dist.get_rank()


_CALLS = itertools.count()


def step(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(dist.get_rank())
    model(torch.randn(2048, 256)).square().mean().backward()
    return [local(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]


def local(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def gathered(told: Any) -> list[Any]:
    """What both ranks tell."""
    both: list[Any] = [None, None]
    dist.all_gather_object(both, told)
    return both


def limits(number: int, store: TierStore) -> None:
    model = nn.Sequential(*(Summed() for _ in range(4)))
    for block in model[::2]:
        fully_shard(block)
    plain = [step(model), step(model)][-1]
    generous = planned(model, store, far_above())
    tight_bytes = generous.predicted.peak_bytes - 2**20
    plan = planned(model, store, tight_bytes if number == 1 else far_above())
    plan.apply(model)
    found = [step(model) for _ in range(9)][-1]
    plan.remove(model)
    same = all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    told = gathered(([(block.name, block.as_action()) for block in plan.blocks], same))
    if number == 0:
        print(f"the same in both: {told[0] == told[1]}, same bits: {same}")
        print(f"needed: {generous.is_needed}, then {plan.is_needed}")
        print(f"not computed again: {[block.differs for block in plan.blocks if block.differs]}")


def blocks(number: int, store: TierStore) -> None:
    model: nn.Module = nn.Sequential(Summed(), Summed())
    try:
        planned(model if number == 0 else nn.Sequential(model), store, far_above())
    except ConfigError as error:
        is_refused = "plan the same model in all ranks" in str(error)
    else:
        is_refused = False
    refused = gathered(is_refused)
    plan = planned(nn.Sequential(Summed(), Unequal(), Summed()), store, far_above())
    differing = gathered({block.name: block.differs for block in plan.blocks})
    if number == 0:
        print(f"refused where they have other blocks: {refused[0]}, {refused[1]}")
        print(f"not computed again: {differing}")


def planned(model: nn.Module, store: TierStore, limit_bytes: int) -> MemoryPlan:
    return plan_memory(model, lambda: model(torch.randn(2048, 256)).square().mean(), store=store, limit=limit_bytes)


def rank(number: int, directory: str, work: str) -> None:
    faulthandler.dump_traceback_later(110, exit=True)  # if it waits for ever: for what
    dist.init_process_group("gloo", init_method=f"file://{directory}.ranks", rank=number, world_size=2)
    torch.manual_seed(0)
    with TierStore(directory, host_bytes=0) as store:
        (limits if work == "limits" else blocks)(number, store)
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(rank, (sys.argv[1], sys.argv[2]), nprocs=2)

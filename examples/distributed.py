"""Train on several ranks, each with its own store under one path (DDP or FSDP2, here over gloo on the CPU).

torchrun --nproc-per-node 2 examples/distributed.py [PATH]
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tierstore import TierStore, tiered_offload


def train(wrap_fully_sharded: bool, store: TierStore | None) -> list[torch.Tensor]:
    """This rank's part of the gradients after one step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())])
    wrapped: nn.Module
    if wrap_fully_sharded:
        for layer in model:
            fully_shard(layer)
        wrapped = fully_shard(model)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    batch = torch.randn(512, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    if store is None:
        loss = wrapped(batch).square().mean()
    else:
        with tiered_offload(store, min_bytes=0):
            loss = wrapped(batch).square().mean()
        store.flush()
    loss.backward()
    found = [parameter.grad for parameter in wrapped.parameters()]
    return [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in found]


def main(path: str) -> None:
    """Compare each rank's gradients with those without a store."""
    dist.init_process_group("gloo")
    with TierStore(path, host_bytes=0) as store:  # default budgets are divided by the number of ranks on the host
        for name in ("DDP", "FSDP2"):
            expected, found = train(name == "FSDP2", None), train(name == "FSDP2", store)
            same = all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
            stats = store.stats()
            print(
                f"rank {dist.get_rank()}, {name}: {stats.spilled_bytes} bytes spilled so far, "
                f"{stats.kept_bytes['parameter']} bytes of parameters left in place; "
                f"gradients bitwise the same: {'yes' if same else 'NO'}\n",
                end="",  # one write per line: the ranks share a terminal
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else scratch)

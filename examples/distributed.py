"""Train over several ranks with FSDP2, and keep what each of them saves for backward on a drive.

    torchrun --nproc-per-node 2 examples/distributed.py /nvme

Every rank opens a store of its own; they may share the directory. By default each takes its share of the free space
and of the memory (torchrun's LOCAL_WORLD_SIZE says how many there are).
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tierstore import TierStore, tiered_offload

WIDTH, LENGTH, ROWS, NUM_LAYERS, NUM_STEPS = 128, 128, 8, 4, 5


def main() -> None:
    """Five steps on random data."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True)
        for _ in range(NUM_LAYERS)
    ]
    model = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(rank)
    with TierStore(sys.argv[1], host_bytes=0) as store:  # 0: all of it to disk; leave it out for a share of the memory
        for _ in range(NUM_STEPS):
            batch = torch.randn(ROWS, LENGTH, WIDTH)
            with tiered_offload(store, min_bytes="64KiB"):
                loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = store.stats()
        print(
            f"rank {rank}: loss {loss.item():.4f}, {stats.spilled_bytes / 2**20:.0f} MiB spilled, "
            f"{stats.restored_bytes / 2**20:.0f} MiB restored, parameters left in place: "
            f"{stats.kept_bytes['parameter'] / 2**20:.0f} MiB",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

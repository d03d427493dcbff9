"""What one rank of `test_distributed.py` does. Run by torchrun, as `-m tests.hooks.distributed_worker PATH OUT`.

Each rank opens a store of its own under PATH, and writes what it found to OUT/rank-N.json; the test judges it.
"""

import gc
import hashlib
import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.hooks.programs import (
    Around,
    Bits,
    Results,
    Settle,
    Transformer,
    all_bits,
    run_offloaded,
    run_plain,
)
from tierstore import TierStore, offload_module, tiered_offload

LIMIT_SECONDS = 280
"""A rank that lives longer is ended by SIGALRM, whatever has become of those that started it."""
NUM_STEPS = 3
NUM_BLOCKS = 3
WIDTH = 32
SHAPE = (3, 16, WIDTH)  # of a batch


class Block(Transformer):
    """A transformer's block; its loss, scaled onto the batch, goes on to the next, so that every weight counts.

    It saves a parameter through an alias too, which nothing marks as one. FSDP frees that memory after forward and
    fills it again for backward.
    """

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * self.norms[0].weight.detach() * (1 + super().forward(batch)).tanh()


class Net(nn.Module):
    """Blocks, of which the second has a frozen weight and the last can be left out of a forward."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(NUM_BLOCKS))
        self.blocks[1].out.weight.requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.is_checkpointed = is_checkpointed

    def forward(self, batch: torch.Tensor, num_blocks: int = NUM_BLOCKS) -> torch.Tensor:
        for block in self.blocks[:num_blocks]:
            batch = checkpoint(block, batch, use_reentrant=False) if self.is_checkpointed else block(batch)
        return self.head(batch).float().exp().mean()


def ddp(net: Net, **options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net, **options)


def fsdp(net: Net, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def fsdp_bfloat16(net: Net) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp(net, mp_policy=policy, reshard_after_forward=True)


@dataclass(frozen=True)
class Variant:
    """One way to train a `Net` on several ranks.

    Attributes:
        wrap: makes the model that the ranks train together.
        num_micro_batches: whose gradients are added up before each step; they are reduced with the last.
        skips_block: in every second step a rank leaves out the last block, while the other one does not.
        is_checkpointed: blocks are computed again in backward.
        offloads_blocks: every block is wrapped in `offload_module`; else one scope is around the forward.
    """

    wrap: Callable[[Net], nn.Module]
    num_micro_batches: int = 1
    skips_block: bool = False
    is_checkpointed: bool = False
    offloads_blocks: bool = False


RESHARDING = partial(fsdp, reshard_after_forward=True)

VARIANTS = {
    "ddp, unused parameters, accumulation": Variant(
        partial(ddp, find_unused_parameters=True), num_micro_batches=2, skips_block=True
    ),
    "ddp, gradients in the buckets": Variant(partial(ddp, gradient_as_bucket_view=True), num_micro_batches=2),
    "ddp, checkpointing": Variant(ddp, is_checkpointed=True),
    "ddp, each block offloads": Variant(ddp, offloads_blocks=True),
    "fsdp, resharding, accumulation": Variant(RESHARDING, num_micro_batches=2),
    "fsdp, resharding, checkpointing": Variant(RESHARDING, is_checkpointed=True),
    "fsdp, resharding, bfloat16": Variant(fsdp_bfloat16),
    "fsdp, resharding, each block offloads": Variant(RESHARDING, offloads_blocks=True),
    "fsdp, not resharding": Variant(partial(fsdp, reshard_after_forward=False)),
}


def train(
    variant: Variant, around: Around, settle: Settle, offload: Callable[[nn.Module], nn.Module] = lambda block: block
) -> Results:
    """Some steps: losses, gradients of this rank's parts, and in the end the parameters."""
    net = Net(is_checkpointed=variant.is_checkpointed)
    if variant.offloads_blocks:
        net.blocks = nn.ModuleList(map(offload, net.blocks))
        around = nullcontext
    model = variant.wrap(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())  # the ranks' batches and dropouts differ
    results: Results = []
    for step in range(NUM_STEPS):
        skips_block = variant.skips_block and (step + dist.get_rank()) % 2 == 1
        for number in range(variant.num_micro_batches):
            with nullcontext() if number == variant.num_micro_batches - 1 else not_reducing(model):
                with around():
                    loss = model(torch.randn(SHAPE), NUM_BLOCKS - skips_block)
                settle()
                loss.backward()
            results += [loss.detach(), *(local_copy(parameter.grad) for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    assert all(tensor is None or tensor.isfinite().all() for tensor in results), "nothing is shown by NaNs"
    return results + [local_copy(parameter) for parameter in model.parameters()]


@contextmanager
def not_reducing(model: nn.Module) -> Iterator[None]:
    """Gradients are added up on each rank and not reduced."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    yield
    model.set_requires_gradient_sync(True)  # type: ignore[operator]


def local_copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of it."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()


def compare(variant: Variant, store: TierStore) -> dict[str, Any]:
    """Plainly, and offloaded twice: with all on disk before backward, and with writes in flight."""
    expected = run_plain(partial(train, variant))
    gc.collect()
    before = store.stats()
    offload = partial(offload_module, store=store, min_bytes=0)
    found = run_offloaded(partial(train, variant, offload=offload), store)
    gc.collect()  # models under FSDP and DDP are in reference cycles, and the last graph hangs on them
    after = store.stats()
    torch.manual_seed(0)
    in_flight = all_bits(train(variant, lambda: tiered_offload(store, min_bytes=0), lambda: None, offload))
    gc.collect()
    last = store.stats()
    kept = {reason for reason in after.kept_bytes if after.kept_bytes[reason] > before.kept_bytes[reason]}
    return {
        "num_tensors": 2 * sum(one is not None for one in expected),
        "differing": [at for at, one in enumerate(expected) if one != found[at] or one != in_flight[at]],
        "parameters": digest(expected),
        "spilled_bytes": after.spilled_bytes - before.spilled_bytes,
        "restored_bytes": after.restored_bytes - before.restored_bytes,
        "kept": sorted(kept),
        "left": [last.live_handles, last.disk_bytes, last.lent_bytes],
    }


def digest(results: list[Bits]) -> str:
    """Of what is last in the results of a training: as many parameters as a `Net` has."""
    last = results[-len(list(Net().parameters())) :]
    return hashlib.sha256(b"".join(one[2] for one in last if one is not None)).hexdigest()


def main() -> None:
    signal.alarm(LIMIT_SECONDS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_SECONDS))
    warnings.simplefilter("error")
    with TierStore(sys.argv[1], host_bytes=0, disk_bytes="2GiB", codec="none") as store:
        report = {name: compare(variant, store) for name, variant in VARIANTS.items()}
    Path(sys.argv[2], f"rank-{dist.get_rank()}.json").write_text(json.dumps(report), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

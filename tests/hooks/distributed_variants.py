"""The models that the ranks of `test_distributed.py` train, and the ways in which they do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.hooks.programs import Around, Settle, Transformer

NUM_STEPS = 3
NUM_BLOCKS = 3
WIDTH = 32
SHAPE = (3, 16, WIDTH)  # of a batch

Wrap = Callable[["Net"], nn.Module]


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

    wrap: Wrap
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


class Training:
    """Some steps of one variant: a `Program`, called with what is around forward and what comes before backward."""

    def __init__(self, variant: Variant, offload: Callable[[nn.Module], nn.Module] = lambda block: block) -> None:
        self.variant = variant
        self.offload = offload
        self.model: nn.Module = nn.Identity()

    def __call__(self, around: Around, settle: Settle) -> list[torch.Tensor | None]:
        variant = self.variant
        net = Net(is_checkpointed=variant.is_checkpointed)
        if variant.offloads_blocks:
            net.blocks = nn.ModuleList(map(self.offload, net.blocks))
            around = nullcontext
        self.model = variant.wrap(net)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        torch.manual_seed(1 + dist.get_rank())  # the ranks' batches and dropouts differ
        results: list[torch.Tensor | None] = []
        for step in range(NUM_STEPS):
            skips_block = variant.skips_block and (step + dist.get_rank()) % 2 == 1
            for number in range(variant.num_micro_batches):
                is_last = number == variant.num_micro_batches - 1
                batch = torch.randn(SHAPE)
                with nullcontext() if is_last else not_reducing(self.model):
                    with around():
                        loss = self.model(batch, NUM_BLOCKS - skips_block)
                    settle()
                    loss.backward()
                results += [loss.detach(), *map(local_copy, gradients(self.model))]
            optimizer.step()
            optimizer.zero_grad()
        assert all(tensor is None or tensor.isfinite().all() for tensor in results), "nothing is shown by NaNs"
        return results + [local_copy(parameter) for parameter in self.model.parameters()]


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


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def local_copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of it."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()

"""What the ranks of `test_two_hosts.py` train, and which of it one process can repeat bit for bit.

Floating-point addition is commutative, but not associative. So a sum over ranks has the same bits in whatever order it
is taken only if

* there are two addends: over two ranks every order is the same; or
* all addends are equal: 2g and 4g are exact, and 3g + g is rounded back to 4g. Division by 4 is exact.

A sum of four different gradients depends on how the collective divides the buffer among the ranks. One process could
repeat it only by doing the same, so that variant is compared with the same ranks without a store alone. The one that is
replicated over hosts and sharded within each has two sums of two, one in the other, which one process can repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tierstore import TierStore, tiered_offload

__all__ = ["NUM_STEPS", "VARIANTS", "Net", "Outcome", "Training", "Variant", "train_alone"]

WORLD_SIZE = 4
NUM_STEPS = 4
NUM_BLOCKS = 3
ROWS = 64
WIDTH = 128
"""Each rank's part of a bias has 32 elements at least: whole vectors, so the optimizer treats all elements alike."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, batch: Tensor) -> Tensor:
        return batch + self.layers(batch)


class Net(nn.Module):
    """The same weights every time.

    Attributes:
        half_way: called with what the middle block gives, whenever it gives something.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.half_way: Callable[[Tensor], None] = lambda _: None

    def forward(self, batch: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            batch = block(batch)
            if number == NUM_BLOCKS // 2:
                self.half_way(batch)
        return batch.square().mean()


class Variant(NamedTuple):
    """One way to train a `Net` on four ranks.

    Attributes:
        wrap: makes the model that the ranks train together.
        equal_batches: all ranks have the same batch; else each has its own.
        reduced: what becomes of the gradients of ranks 0 to 3, as one process can repeat it; None: it cannot.
    """

    wrap: Callable[[Net], nn.Module]
    equal_batches: bool
    reduced: Callable[[Sequence[Tensor]], Tensor] | None


def _replicated(net: Net) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net)


def _sharded(net: Net) -> nn.Module:
    return _on_mesh(net, init_device_mesh("cpu", (WORLD_SIZE,)))


def _sharded_in_hosts(net: Net) -> nn.Module:
    return _on_mesh(net, init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks")))


def _on_mesh(net: Net, mesh: Any) -> nn.Module:
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _first(gradients: Sequence[Tensor]) -> Tensor:
    return gradients[0]


def _by_hosts(gradients: Sequence[Tensor]) -> Tensor:
    first, second, third, fourth = gradients
    return ((first + second) / 2 + (third + fourth) / 2) / 2


VARIANTS = {
    "DDP, equal batches": Variant(_replicated, True, _first),
    "FSDP2, equal batches": Variant(_sharded, True, _first),
    "FSDP2": Variant(_sharded, False, None),
    "FSDP2, replicated over hosts": Variant(_sharded_in_hosts, False, _by_hosts),
}


class Outcome(NamedTuple):
    """What came of a training: this rank's losses, and all parameters, whole."""

    losses: list[float]
    parameters: list[Tensor]

    def differing(self, other: Outcome) -> list[int]:
        """Which losses (from 0) and parameters (from 100) have other bits."""
        losses = enumerate(zip(self.losses, other.losses, strict=True))
        parameters = enumerate(zip(self.parameters, other.parameters, strict=True), 100)
        unlike = [number for number, (mine, others) in losses if mine != others]
        return unlike + [number for number, pair in parameters if not torch.equal(*pair)]


def _loss(model: nn.Module, step: int, number: int) -> Tensor:
    """That of one batch: everything random in it follows from step and number."""
    torch.manual_seed(1 + WORLD_SIZE * step + number)
    return model(torch.randn(ROWS, WIDTH))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


class Training:
    """One variant on this rank.

    Attributes:
        net: the model inside of the wrapper.
        model, optimizer: of the training.
        step: the next one.
        losses: of this rank, step by step.
    """

    def __init__(self, variant: Variant) -> None:
        self.net = Net()
        self.model = variant.wrap(self.net)
        self.optimizer = _optimizer(self.model)
        self.step = 0
        self.losses: list[float] = []
        self._batch = 0 if variant.equal_batches else dist.get_rank()

    def run(self, store: TierStore | None, after_step: Callable[[], None] = lambda: None) -> Outcome:
        """The steps that are left."""
        while self.step < NUM_STEPS:
            with nullcontext() if store is None else tiered_offload(store, min_bytes=0):
                loss = _loss(self.model, self.step, self._batch)
            if store is not None:
                store.flush()  # else backward would find most of it in memory still
            loss.backward()
            self.losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            after_step()
        return self.outcome()

    def outcome(self) -> Outcome:
        """Blocks until all ranks have asked for it."""
        whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in self.model.parameters()]
        return Outcome(self.losses, [one.detach().clone() for one in whole])


def train_alone(variant: Variant, reduced: Callable[[Sequence[Tensor]], Tensor]) -> Outcome:
    """The same training in this process alone: the batches of all ranks, one after the other."""
    net = Net()
    optimizer, losses = _optimizer(net), []
    for step in range(NUM_STEPS):
        gradients = []
        for number in range(1 if variant.equal_batches else WORLD_SIZE):
            loss = _loss(net, step, number)
            if number == (0 if variant.equal_batches else dist.get_rank()):
                losses.append(loss.item())
            gradients.append(torch.autograd.grad(loss, list(net.parameters())))
        for parameter, of_all in zip(net.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = reduced(of_all)
        optimizer.step()
    return Outcome(losses, [one.detach() for one in net.parameters()])

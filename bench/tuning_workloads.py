"""Three trainings on the CPU whose saved tensors are worth moving: what prefetching is tuned on.

| name | what backward's order is like |
|---|---|
| transformer | layers one after the other: reverse order is right but for details |
| convolutional | a residual network, whose shortcuts are asked for out of turn |
| branching | branches of different depths, with matrix decompositions in them, and heads whose losses meet at the end |

Parameters, batch and so every step are the same each time, to the bit, given the number of threads: one, so that what
is left of two cores is the store's, and a step shows where it waited rather than who took its core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tierstore.demo.model import ByteTransformer, ModelShape

from .branching import ROWS, WIDTH, Stage
from .gpu.models import ResNet, ResNetShape

__all__ = [
    "NUM_THREADS",
    "SAVED_BYTES",
    "TRANSFORMER_BATCH",
    "WORKLOADS",
    "Workload",
    "make_transformer",
    "make_workload",
]

NUM_THREADS = 1
"""Given to `torch.set_num_threads` by who measures; the saved bytes do not depend on it, the last bits may."""

TRANSFORMER_BATCH = 8

SAVED_BYTES = {"transformer": 174_063_616, "convolutional": 232_783_872, "branching": 189_792_256}
"""What one step saves in storages of 1 MiB and more that nobody else holds; all is alive at the end of forward."""


@dataclass(frozen=True)
class Workload:
    """A model that returns the loss of a batch.

    Attributes:
        name: of `WORKLOADS`.
        model: it; the gradients of a step stay in its parameters until the next.
        batch: its arguments.
    """

    name: str
    model: nn.Module
    batch: tuple[Tensor, ...]

    @property
    def saved_bytes(self) -> int:
        """See `SAVED_BYTES`."""
        return SAVED_BYTES[self.name]

    def step(
        self,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Drop the last gradients, forward, backward. No optimizer: each step is the same as the one before.

        Args:
            around: makes the context of forward, such as `tiered_offload(store)`.
            between: called between forward and backward.
        """
        self.model.zero_grad()
        with around():
            loss = self.model(*self.batch)
        between()
        loss.backward()


def make_workload(name: str) -> Workload:
    """The workload of that name, with the same bits each time. Seeds torch's default generator."""
    torch.manual_seed(0)
    return Workload(name, *WORKLOADS[name]())


def make_transformer(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The transformer for so many texts; what it saves is in proportion. Draws on torch's default generator."""
    shape = ModelShape(layers=5, width=256, heads=4, context=256)
    text = torch.randint(256, (batch, shape.context + 1))
    return ByteTransformer(shape), (text[:, :-1], text[:, 1:])


def _convolutional() -> tuple[nn.Module, tuple[Tensor, ...]]:
    shape = ResNetShape(stages=(3, 3), width=16, batch=48, side=128)
    images = torch.randn(shape.batch, 3, shape.side, shape.side)
    return ResNet(shape), (images, torch.randint(1000, (shape.batch,)))


def _branching() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Decomposing(num_stages=2), (torch.randn(ROWS, WIDTH),)


WORKLOADS: Mapping[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "transformer": partial(make_transformer, batch=TRANSFORMER_BATCH),
    "convolutional": _convolutional,
    "branching": _branching,
}


class Decomposing(nn.Module):
    """Stages of three branches, each after one of matrices; the loss is the sum of all heads' losses."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(num_stages))
        self.matrices = nn.ModuleList(Matrices() for _ in range(num_stages))

    def forward(self, x: Tensor) -> Tensor:
        """The loss, of shape [rows, width]."""
        losses = []
        for stage, matrices in zip(self.stages, self.matrices, strict=True):
            x, loss = stage(x + matrices(x))
            losses.append(loss)
        return torch.stack(losses).sum()


class Matrices(nn.Module):
    """Rows made uncorrelated in groups (Cholesky), the shrunken singular values of some (SVD), and a solved system."""

    GROUPS, PIECES, PIECE_ROWS = 16, 16, 64

    def __init__(self) -> None:
        super().__init__()
        self.system = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Shape [rows, width] in and out."""
        identity = torch.eye(WIDTH)
        groups = x.view(self.GROUPS, -1, WIDTH)
        root = torch.linalg.cholesky(groups.mT @ groups / groups.shape[1] + identity)
        white = torch.linalg.solve_triangular(root, groups.mT, upper=False).mT.reshape(x.shape)
        solved = torch.linalg.solve(identity + self.system, x, left=False)
        pieces = x[: self.PIECES * self.PIECE_ROWS].view(self.PIECES, self.PIECE_ROWS, WIDTH)
        left, values, right = torch.linalg.svd(pieces, full_matrices=False)
        shrunk = (left * values.tanh().unsqueeze(1)) @ right
        return white + solved.tanh() * shrunk.mean((0, 1))

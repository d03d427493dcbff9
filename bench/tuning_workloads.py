"""Trainings on the CPU whose saved tensors are worth moving: what prefetching is tuned on.

A transformer (layers one after the other), a residual network, whose shortcuts are asked for out of turn, and branches
of different depths with matrix decompositions in them, and heads whose losses meet at the end. Parameters, batch and so
every step are the same each time, to the bit, given the number of threads: one, so that what is left of two cores is
the store's, and a step shows where it waited rather than who took its core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tierstore import TierStore, tiered_offload
from tierstore.demo.model import ByteTransformer, ModelShape
from tierstore.testing import Bandwidth, FaultPlan, FaultyStore, Rule

from .gpu.models import ResNet, ResNetShape
from .trainings import Figures, Forward

NUM_THREADS = 1
"""Given to `torch.set_num_threads` by who measures; the saved bytes do not depend on it, the last bits may."""
ROWS, WIDTH = 8192, 256
SAVED_BYTES = {"transformer": 174_063_616, "convolutional": 232_783_872, "branching": 189_792_256}
"""What one step saves in storages of 1 MiB and more that nobody else holds; all is alive at the end of forward."""
CAUSES = {"pack_waits": "pack waits for budget", "unpack_waits": "unpack waits for restore"}


@dataclass(frozen=True)
class Workload:
    """A model that returns the loss of a batch; the gradients of a step stay in its parameters until the next."""

    model: nn.Module
    batch: tuple[Tensor, ...]
    saved_bytes: int

    def step(self, around: Forward = nullcontext, between: Callable[[], object] = lambda: None) -> None:
        """Drop the last gradients, forward, `between`, backward. No optimizer: each step is like the one before."""
        self.model.zero_grad()
        with around():
            loss = self.model(*self.batch)
        between()
        loss.backward()


def make_workload(name: str) -> Workload:
    torch.manual_seed(0)
    return WORKLOADS[name]()


def transformer(batch: int = 8) -> Workload:
    """For so many texts; what it saves is in proportion. Draws on torch's default generator."""
    shape = ModelShape(layers=5, width=256, heads=4, context=256)
    text = torch.randint(256, (batch, shape.context + 1))
    return Workload(ByteTransformer(shape), (text[:, :-1], text[:, 1:]), SAVED_BYTES["transformer"] * batch // 8)


def _convolutional() -> Workload:
    shape = ResNetShape(stages=(3, 3), width=16, batch=48, side=128)
    images = torch.randn(shape.batch, 3, shape.side, shape.side)
    model = ResNet(shape)
    return Workload(model, (images, torch.randint(1000, (shape.batch,))), SAVED_BYTES["convolutional"])


def branching(num_stages: int, saved_bytes: int, *, has_matrices: bool) -> Workload:
    model = Branching(num_stages, has_matrices=has_matrices)
    return Workload(model, (torch.randn(ROWS, WIDTH),), saved_bytes)


WORKLOADS: Mapping[str, Callable[[], Workload]] = {
    "transformer": transformer,
    "convolutional": _convolutional,
    "branching": partial(branching, 2, SAVED_BYTES["branching"], has_matrices=True),
}


class Branching(nn.Module):
    """Stages one after the other, each after one of matrices, if it has them; the loss is the sum of all heads'."""

    def __init__(self, num_stages: int, *, has_matrices: bool) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(num_stages))
        self.matrices = nn.ModuleList(Matrices() for _ in range(num_stages if has_matrices else 0))

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for place, stage in enumerate(self.stages):
            x, loss = stage(x + self.matrices[place](x) if self.matrices else x)
            losses.append(loss)
        return torch.stack(losses).sum()


class Stage(nn.Module):
    """Three branches from one stem: of four operations, of one, and a head whose loss is added at the very end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.long, self.short = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        stem = self.stem(x).tanh()
        short = self.short(stem).sigmoid()
        long = (self.long(stem).sin() * stem).softmax(-1).exp()
        x = x + short * long
        return x, self.head(x.tanh()).square().mean()


class Matrices(nn.Module):
    """Rows made uncorrelated in groups (Cholesky), the shrunken singular values of some (SVD), and a solved system."""

    GROUPS, PIECES, PIECE_ROWS = 16, 16, 64

    def __init__(self) -> None:
        super().__init__()
        self.system = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        identity = torch.eye(WIDTH)
        groups = x.view(self.GROUPS, -1, WIDTH)
        root = torch.linalg.cholesky(groups.mT @ groups / groups.shape[1] + identity)
        white = torch.linalg.solve_triangular(root, groups.mT, upper=False).mT.reshape(x.shape)
        solved = torch.linalg.solve(identity + self.system, x, left=False)
        pieces = x[: self.PIECES * self.PIECE_ROWS].view(self.PIECES, self.PIECE_ROWS, WIDTH)
        left, values, right = torch.linalg.svd(pieces, full_matrices=False)
        shrunk = (left * values.tanh().unsqueeze(1)) @ right
        return white + solved.tanh() * shrunk.mean((0, 1))


class Contender:
    """A workload with a store, or none, that takes a step when it is told to; `steps`: figures of each so far. `around`
    makes the context of forward; None: `tiered_offload` of the store, with the options."""

    def __init__(
        self, workload: Workload, store: TierStore | None = None, around: Forward | None = None, **options: Any
    ) -> None:
        self.steps: list[Figures] = []
        self._workload = workload
        self._store = store
        scope = nullcontext if store is None else partial(tiered_offload, store, **options)
        self._around: Forward = around or scope

    def step(self) -> float:
        """One step, timed; then waits, untimed, until the store is idle, so that the next one has the drive alone."""
        before = None if self._store is None else self._store.stats()
        times = [time.perf_counter()]
        self._workload.step(self._around, lambda: times.append(time.perf_counter()))
        began, halfway, ended = *times, time.perf_counter()
        figures = {
            "step_seconds": ended - began,
            "forward_seconds": halfway - began,
            "backward_seconds": ended - halfway,
        }
        if self._store is not None and before is not None:
            after = self._store.stats()
            for name in ("prefetch_hits", "prefetch_late", "prefetch_misses", "spilled_bytes"):
                figures[name.removeprefix("prefetch_")] = getattr(after, name) - getattr(before, name)
            for name, cause in CAUSES.items():
                figures[f"{name}_seconds"] = after.stall_seconds[cause] - before.stall_seconds[cause]
            self._store.flush()
        self.steps.append(figures)
        return figures["step_seconds"]

    def median(self, figure: str, after: int) -> float:
        return statistics.median(step[figure] for step in self.steps[after:])


def open_store(scratch: Path, bytes_per_second: float | None, **options: Any) -> TierStore:
    """A store without codec; `bytes_per_second`: of its drive, reads and writes together; None: as it is."""
    if bytes_per_second is None:
        return TierStore(scratch, codec="none", **options)
    paced = FaultPlan.of(Rule(("write", "read"), Bandwidth(bytes_per_second)))
    return FaultyStore(scratch, paced, codec="none", **options)


def speed_that_keeps_up(workload: Workload, plain: Contender, host_bytes: int) -> float:
    """Bytes per second that have to move in the shorter of forward and backward of the last plain step."""
    shortest = min(plain.steps[-1][f"{way}_seconds"] for way in ("forward", "backward"))
    return (workload.saved_bytes - host_bytes) / shortest

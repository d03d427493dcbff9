"""Random graphs: the same leaves and steps are run plainly and under a store, and their gradients compared."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses
from torch.utils.checkpoint import checkpoint

__all__ = ["Graph", "InjectedError", "loss_of", "make_graph"]


class InjectedError(Exception):
    """Thrown by us in the middle of a graph."""


class _Faulty(torch.autograd.Function):
    """The identity, that may raise in either direction; it saves its input."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, fault: str) -> Tensor:
        if fault == "forward":
            raise InjectedError(fault)
        context.save_for_backward(tensor)
        context.fault = fault
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.saved_tensors  # noqa: B018 - as a kernel would
        if context.fault == "backward":
            raise InjectedError(context.fault)
        return gradient, None


class Graph(NamedTuple):
    """What to compute.

    Attributes:
        steps: names, in order.
        leaves: the weights, one for each step, and the batch; all want gradients.
    """

    steps: tuple[str, ...]
    leaves: list[Tensor]


def _gated(tensor: Tensor, weight: Tensor) -> Tensor:
    left, right = (tensor @ weight).chunk(2, -1)
    return torch.cat([left.sigmoid() * right, right.tanh() * left], -1)


def _branching(tensor: Tensor, weight: Tensor) -> Tensor:
    left = tensor @ weight
    return left.relu() * tensor + tensor.sin().cumsum(0) * 0.01


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda tensor, weight: tensor @ weight,
    "tanh": lambda tensor, weight: tensor.tanh() * weight[0],
    "gelu": lambda tensor, weight: F.gelu(tensor + weight[0]),
    "relu": lambda tensor, weight: (tensor @ weight).relu(),
    "norm": lambda tensor, weight: F.layer_norm(tensor, tensor.shape[-1:], weight[0]),
    "softmax": lambda tensor, weight: (tensor * weight[0]).softmax(-1) + tensor,
    "masked": lambda tensor, weight: torch.where(tensor > 0, tensor * weight[0], tensor.square()),
    "gated": _gated,
    "branching": _branching,
    "checkpointed": lambda *given: checkpoint(_gated, *given, use_reentrant=False, preserve_rng_state=False),
    "sliced": lambda tensor, weight: torch.cat([tensor[:, ::2].exp().log1p(), (tensor @ weight)[:, 1::2]], -1),
    "odd": lambda tensor, weight: (tensor.double() @ weight.double()).tanh().to(tensor.dtype) + tensor,
}  # fmt: skip


def make_graph(chance: random.Random) -> Graph:
    """Two to seven steps over a batch of 4 KiB to 1 MiB."""
    generator = torch.Generator().manual_seed(chance.getrandbits(40))
    dtype = chance.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    width, rows = chance.choice([16, 32, 64, 128]), chance.choice([33, 64, 256, 1024])
    steps = tuple(chance.choice(list(STEPS)) for _ in range(chance.randint(2, 7)))
    weights = [torch.randn(width, width, generator=generator, dtype=dtype) / width**0.5 for _ in steps]
    batch = torch.randn(rows, width, generator=generator, dtype=dtype)
    return Graph(steps, [leaf.requires_grad_() for leaf in (*weights, batch)])


def loss_of(
    graph: Graph, fault: str = "", around: Callable[[int], Any] | None = None, seen: list[Tensor] | None = None
) -> Tensor:
    """Forward.

    Args:
        graph: what to compute.
        fault: "forward" or "backward": where its middle raises `InjectedError`; "": nowhere.
        around: gives a context manager for each step.
        seen: receives a tensor that is saved for backward.
    """
    hidden = graph.leaves[-1] * 1.0
    for number, (name, weight) in enumerate(zip(graph.steps, graph.leaves, strict=False)):
        if number == len(graph.steps) // 2:
            hidden = _Faulty.apply(hidden, fault)
        if around is None:
            hidden = STEPS[name](hidden, weight)
        else:
            with around(number):
                hidden = STEPS[name](hidden, weight)
    hidden = hidden.sigmoid()
    if seen is not None:
        seen.append(hidden)
    return hidden.square().mean()

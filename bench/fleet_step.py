"""The step of a large transformer from its published shapes: what each block saves, and how long it computes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tierstore.simulator import Action, Compute, EndScope, Pack, Release, Saved, Unpack, Workload

__all__ = ["EVERYTHING", "INPUTS", "KEPT", "MODEL", "NUM_RANKS", "PRODUCTS", "Model", "Policy", "step_of_rank"]

NUM_RANKS = 8
"""Of a host."""
FLOPS_PER_SECOND = 380e12
"""Of one accelerator, sustained: what the Llama 3 paper (arXiv:2407.21783, table 4) reports for the 405B model on H100
with sequences of 131,072 tokens. An H200 computes as fast as an H100. That the 70B model does as well is assumed."""
DEVICE_MEMORY_BYTES_PER_SECOND = 4.8e12
"""Of an H200, by NVIDIA's data sheet."""


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer with grouped-query attention and a gated feed-forward layer, in bfloat16.

    Attributes:
        layers: number of blocks.
        hidden, kv, ffn: widths of the residual stream, of the keys (and of the values), of the feed-forward layer.
        heads: of attention; it saves one float32 for each token and head.
        vocabulary: number of tokens that the last layer tells apart.
        tokens: of a sequence. Each host computes one sequence in a step.
    """

    layers: int
    hidden: int
    kv: int
    ffn: int
    heads: int
    vocabulary: int
    tokens: int

    def bytes_per_token(self, width: str) -> int:
        """What a saved tensor of that width takes for each token."""
        return {"hidden": 2 * self.hidden, "kv": 2 * self.kv, "ffn": 2 * self.ffn, "heads": 4 * self.heads}[width]

    def flops_per_token(self, operation: str) -> float:
        """Of that operation of a block, in forward. Attention looks at half of the sequence, on average."""
        return {
            "square": 2.0 * self.hidden * self.hidden,
            "kv": 2.0 * self.hidden * self.kv,
            "attention": 2.0 * self.hidden * self.tokens,
            "ffn": 2.0 * self.hidden * self.ffn,
        }[operation]


MODEL = Model(layers=80, hidden=8192, kv=1024, ffn=28672, heads=64, vocabulary=128256, tokens=131072)
"""Llama 3.1 70B at its longest context: shapes of table 3 of the paper. Assumed: tensor and sequence parallelism over
the 8 ranks of a host, so that each has an eighth of every tensor and of the work, and data parallelism over hosts."""


class Tensor(NamedTuple):
    """A tensor that a block saves, and the operations that follow before it saves the next one."""

    width: str
    then: tuple[str, ...] = ()


class Policy(NamedTuple):
    """What a block saves.

    Attributes:
        saved: in the order of forward.
        passes: device memory that backward reads and writes to compute cheap operations again: widths of a token.
        repeats_forward: backward computes the whole block again.
    """

    saved: tuple[Tensor, ...]
    passes: tuple[tuple[int, str], ...] = ()
    repeats_forward: bool = False


EVERYTHING, PRODUCTS, INPUTS = "everything", "results of products", "inputs of blocks"
_BLOCK = ("square", "kv", "kv", "attention", "square", "ffn", "ffn", "ffn")
KEPT: Mapping[str, Policy] = {
    EVERYTHING: Policy(
        (
            Tensor("hidden"),  # input, and its norm
            Tensor("hidden", ("square",)),
            Tensor("hidden", ("kv",)),  # queries, keys, values
            Tensor("kv", ("kv",)),
            Tensor("kv", ("attention",)),
            Tensor("hidden"),  # result of attention, with a number for each head
            Tensor("heads", ("square",)),
            Tensor("hidden"),  # the residual stream, and its norm
            Tensor("hidden", ("ffn",)),
            Tensor("ffn"),  # gate, its activation, the other half, and the product of both
            Tensor("ffn", ("ffn",)),
            Tensor("ffn"),
            Tensor("ffn", ("ffn",)),
        )
    ),
    PRODUCTS: Policy(
        (
            Tensor("hidden", ("square",)),
            Tensor("hidden", ("kv",)),
            Tensor("kv", ("kv",)),
            Tensor("kv", ("attention",)),
            Tensor("hidden"),
            Tensor("heads", ("square",)),
            Tensor("hidden", ("ffn",)),  # what attention's last product gave
            Tensor("ffn", ("ffn",)),
            Tensor("ffn", ("ffn",)),
        ),
        passes=((9, "hidden"), (2, "kv"), (5, "ffn")),  # two norms, the sum, rotations; activation and product
    ),
    INPUTS: Policy((Tensor("hidden", _BLOCK),), repeats_forward=True),
}
"""`PRODUCTS` is selective checkpointing that computes again all but matrix products and attention; `INPUTS` is
checkpointing of every block."""


def step_of_rank(model: Model, policy: Policy, num_ranks: int = NUM_RANKS) -> Workload:
    """A step of one rank: its share of one sequence, forward and backward; backward takes twice as long as forward."""
    tokens = model.tokens / num_ranks
    second = FLOPS_PER_SECOND / tokens
    gaps = [sum(map(model.flops_per_token, tensor.then)) / second for tensor in policy.saved]
    moved = sum(times * model.bytes_per_token(width) for times, width in policy.passes)
    again_seconds = tokens * moved / DEVICE_MEMORY_BYTES_PER_SECOND + policy.repeats_forward * sum(gaps)
    head_seconds = 2.0 * model.hidden * model.vocabulary / second
    sizes = [round(tokens * model.bytes_per_token(tensor.width)) for tensor in policy.saved] * model.layers
    saved = [Saved(nbytes, node, kind="bfloat16", on_device=True) for node, nbytes in enumerate(sizes)]
    actions: list[Action] = []
    for index in range(len(saved)):
        actions += [Pack(index), Compute(gaps[index % len(gaps)])]
    actions += [Compute(head_seconds), EndScope(), Compute(2 * head_seconds)]
    for index in reversed(range(len(saved))):
        of_block = index % len(gaps)
        repeated_seconds = again_seconds if of_block == len(gaps) - 1 else 0.0
        actions += [Unpack(index), Compute(repeated_seconds + 2 * gaps[of_block]), Release(index)]
    return Workload(saved, actions)

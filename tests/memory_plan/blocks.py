"""Models of one kind of block each, and steps with every action that a plan may take on their blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses
from torch.utils.checkpoint import checkpoint

from tests.hooks.programs import SIDE, Bits, all_bits, bits
from tierstore import TierStore, tiered_offload
from tierstore.hooks.in_place import around_calls_of
from tierstore.hooks.module import ModuleScope
from tierstore.memory_plan.applied import PlannedCalls
from tierstore.memory_plan.call_tree import Storages
from tierstore.memory_plan.decision import Action, BlockPlan, HeldOutput, options_of
from tierstore.memory_plan.recording import BlockRecording, RecordedCall
from tierstore.memory_plan.steps import with_calls

KEEP, STORE = Action("keep"), Action("store")
RECOMPUTE, RECOMPUTE_STORED = Action("recompute"), Action("recompute", stores=True)

Step = Callable[[nn.Module], torch.Tensor]


class Chain(nn.Module):
    """Two blocks, one after the other. Something is computed between them, so that their inputs are new tensors."""

    def __init__(self, make: Callable[[], nn.Module], num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            batch = batch + block(batch * 1.5)
        return batch


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIDE, SIDE)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIDE, 2 * SIDE), nn.Linear(2 * SIDE, SIDE)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(F.gelu(self.first(batch)), 0.2)).tanh()  # type: ignore[no-any-return]


class Normed(nn.Module):
    """Running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(SIDE, SIDE), nn.BatchNorm1d(SIDE)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.inner(batch)), inplace=True)


class Spectral(nn.Module):
    """Forward changes two buffers in place, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(SIDE, SIDE))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.inner(batch).sin()  # type: ignore[no-any-return]


class InPlace(nn.Module):
    """Results are changed in place by the operators that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(inplace=True), nn.Linear(SIDE, SIDE))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(batch.exp().clamp(max=3))
        hidden += 1
        return F.dropout(hidden.mul_(2).cos(), 0.3, inplace=True)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        result = values.sin() * factor
        ctx.save_for_backward(values, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        values, result = ctx.saved_tensors
        return gradient * values.cos() * ctx.factor + result.detach() * 0, None


class Custom(Inner):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return _Twice.apply(self.inner(batch.tanh()), 2.0).exp()  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Views, a kernel of several outputs, and parts of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(SIDE), nn.Linear(SIDE, 3 * SIDE), nn.Linear(SIDE, SIDE)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(batch)).view(1, SIDE, 3, 4, SIDE // 4).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        return self.out(mixed.transpose(1, 2).reshape(SIDE, SIDE))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """The user checkpoints a part of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, batch.sin(), use_reentrant=False).cos()  # type: ignore[no-any-return]


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE))
        self.inner.compile(backend="aot_eager")

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.inner(batch.sin()).cos()  # type: ignore[no-any-return]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (Mlp, Normed, Spectral, InPlace, Custom, Attention, Checkpointed)
}


def arounds(model: nn.Module) -> list[object]:
    """What is around the calls of its modules."""
    return [around for around in map(around_calls_of, model.modules()) if around is not None]


def the_batch() -> torch.Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(1)).requires_grad_()


def step(model: nn.Module) -> torch.Tensor:
    """The loss of one step."""
    return model(the_batch()).square().mean()  # type: ignore[no-any-return]


def trained(model: nn.Module, take: Step = step, num_steps: int = 2) -> list[Bits]:
    """Gradients of each step, parameters and buffers after some steps, and what the generator gives next."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        take(model).backward()  # type: ignore[no-untyped-call]
        found += all_bits(parameter.grad for parameter in model.parameters())
        optimizer.step()
    return [*found, *all_bits(model.state_dict().values()), bits(torch.rand(4))]


def recorded(model: nn.Module, names: Sequence[str], store: TierStore, take: Step = step) -> list[RecordedCall]:
    """The calls of blocks in one forward, as planning records them."""
    recording = BlockRecording(Storages(model), lambda: None)
    with (
        with_calls(model, {name: recording.around(name) for name in names}),
        tiered_offload(store, min_bytes=1, select=recording.saw),
    ):
        take(model)
    recording.end()
    return recording.calls


def actions_of(calls: Sequence[RecordedCall], *, each_output: bool = False) -> list[Action]:
    """Every action that is proposed for a block with these calls, and to hold all outputs, or each one alone."""
    found = [option.action for option in options_of(calls, 1.0, 0)]
    every = tuple(
        HeldOutput(number, operator.name) for number, operator in enumerate(calls[0].operators) if operator.can_be_held
    )
    single = [Action("recompute", (output,), True) for output in every] if each_output else []
    forced = [KEEP, STORE, RECOMPUTE, RECOMPUTE_STORED, Action("recompute", every), Action("recompute", every, True)]
    return list(dict.fromkeys([*found, *forced, *single]))


def planned(names: Sequence[str], action: Action, buffers: Sequence[str], store: TierStore) -> dict[str, PlannedCalls]:
    scope = ModuleScope(store, min_bytes=0)
    return {name: PlannedCalls(action, BlockPlan("", "", buffers=tuple(buffers)), scope) for name in names}


def with_action(
    model: nn.Module, names: Sequence[str], action: Action | None, buffers: Sequence[str], store: Any
) -> Any:
    """Inside it an action is taken on blocks of the model; None: none is."""
    return nullcontext() if action is None else with_calls(model, planned(names, action, buffers, store))

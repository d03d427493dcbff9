"""Random small programs with views and edits in place: the same bits, or the same refusal, as plain autograd."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hooks.programs import bits, forget_after_error
from tierstore import TierStore, keep_resident, tiered_offload

SHAPE = (6, 8)

OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "product": lambda left, right: left * right,
    "quotient": lambda left, right: left / (right.square() + 1),
    "sum": lambda left, right: left + right,
    "sine": lambda left, right: left.sin(),
    "tanh": lambda left, right: left.tanh(),
    "exp": lambda left, right: (left * 0.1).exp(),
    "relu": lambda left, right: left.relu(),
    "softmax": lambda left, right: left.softmax(-1),
    "matmul": lambda left, right: left @ right.t() @ left,
    "where": lambda left, right: torch.where(left > right, left, right * 2),
    "max": lambda left, right: left + left.max(-1, keepdim=True).values,
    "gather": lambda left, right: left.gather(1, right.argsort(1)),
    "clone": lambda left, right: left.clone(),
    "detach": lambda left, right: left.detach(),
    "half": lambda left, right: (left.bfloat16() * right.bfloat16()).float(),
    "complex": lambda left, right: (torch.complex(left, right).conj() * torch.complex(right, left)).imag,
}
"""From two tensors of SHAPE to one."""

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda tensor: tensor,
    "first rows": lambda tensor: tensor[:3],
    "last rows": lambda tensor: tensor[3:],
    "column": lambda tensor: tensor[:, 2],
    "stepped": lambda tensor: tensor[:, ::2],
    "transposed": lambda tensor: tensor.t(),
    "flat": lambda tensor: tensor.view(-1)[5:20] if tensor.is_contiguous() else tensor[1],
    "detached": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "chunk": lambda tensor: tensor.chunk(2, 1)[1],
    "unsafe chunk": lambda tensor: tensor.unsafe_chunk(2, 1)[0],
    "expanded": lambda tensor: tensor[:1].expand(2, 8),
}

EDITS: dict[str, Callable[[torch.Tensor], object]] = {
    "add": lambda tensor: tensor.add_(0.5),
    "mul": lambda tensor: tensor.mul_(2),
    "relu": lambda tensor: tensor.relu_(),
    "tanh": lambda tensor: tensor.tanh_(),
    "zero": lambda tensor: tensor.zero_(),
}


class Step(NamedTuple):
    kind: str
    name: str
    view: str
    left: int
    right: int
    no_grad: bool


_INDEX = st.integers(0, 7)
_NEVER = st.just(False)
_VIEW = st.sampled_from(sorted(VIEWS))
_NONE = st.just("")
_STEPS = st.one_of(
    st.builds(Step, st.just("operation"), st.sampled_from(sorted(OPERATIONS)), _NONE, _INDEX, _INDEX, _NEVER),
    st.builds(Step, st.just("read"), st.sampled_from(["sin", "square", "exp"]), _VIEW, _INDEX, _INDEX, _NEVER),
    st.builds(Step, st.just("edit"), st.sampled_from(sorted(EDITS)), _VIEW, _INDEX, _INDEX, st.booleans()),
    st.builds(Step, st.just("forget"), _NONE, _NONE, _INDEX, _INDEX, _NEVER),
    st.builds(Step, st.just("settle"), _NONE, _NONE, _INDEX, _INDEX, _NEVER),
)


class Machine:
    """Runs steps over a few live tensors."""

    def __init__(self, settle: Callable[[], object]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.leaves = [torch.randn(SHAPE, generator=generator, requires_grad=True) for _ in range(2)]
        self.live = [*self.leaves, torch.randn(SHAPE, generator=generator)]
        self.terms: list[torch.Tensor] = []
        self.settle = settle

    def run(self, step: Step) -> None:
        live = self.live
        left, right = live[step.left % len(live)], live[step.right % len(live)]
        if step.kind == "operation":
            live.append(OPERATIONS[step.name](left, right))
        elif step.kind == "read":
            self.terms.append(getattr(VIEWS[step.view](left), step.name)().sum())
        elif step.kind == "edit":
            with torch.no_grad() if step.no_grad else nullcontext():
                EDITS[step.name](VIEWS[step.view](left))
        elif step.kind == "forget" and len(live) > 3:
            del live[3 + step.left % (len(live) - 3)]
        elif step.kind == "settle":
            self.settle()

    def gradients(self) -> list[object]:
        loss = torch.stack([*self.terms, *(tensor.sum() for tensor in self.live)]).sum()
        self.live.clear()
        self.terms.clear()
        self.settle()
        return [bits(loss), *map(bits, torch.autograd.grad(loss, self.leaves, allow_unused=True))]


def _outcome(program: list[Step], late: list[Step], scope: object, settle: Callable[[], object]) -> list[object]:
    """What happens at each step, "refused" where PyTorch or the store raises; then the gradients, or "refused"."""
    machine = Machine(settle)
    seen: list[object] = []
    with scope:  # type: ignore[attr-defined]
        seen += [_attempt(lambda step=step: machine.run(step)) for step in program]  # type: ignore[misc]
    seen += [_attempt(lambda step=step: machine.run(step)) for step in late]  # type: ignore[misc]
    seen.append(_attempt(machine.gradients))
    return seen


def _attempt(action: Callable[[], object]) -> object:
    try:
        return action()
    except RuntimeError as error:
        # Of a view that was edited, plain autograd may name the view first and the version second: both refuse.
        refusal = "modified inplace" if re.search("modified (by an )?inplace", str(error)) else str(error)
        return "refused: " + refusal


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TierStore]]:
    """Opened once: hypothesis runs hundreds of programs over them."""
    directory: Path = tmp_path_factory.mktemp("drive")
    before = set(threading.enumerate())
    opened = [
        TierStore(directory, host_bytes=0, disk_bytes="64MiB", codec="none"),
        TierStore(directory, host_bytes=500, staging_bytes=300, disk_bytes="64MiB", codec="zstd"),
        TierStore(directory, host_bytes="64MiB", disk_bytes="64MiB"),
    ]
    yield opened
    for store in opened:
        store.close()
    assert not [thread for thread in threading.enumerate() if thread not in before]


@given(st.lists(_STEPS, min_size=2, max_size=14), st.lists(_STEPS, max_size=3), st.integers(0, 2), st.booleans())
@settings(
    max_examples=600,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_program_same_outcome_as_plain(
    stores: list[TierStore], program: list[Step], late: list[Step], which: int, resident: bool
) -> None:
    """`late` runs after the scope, before backward; `resident`: the first scope is one of `keep_resident`."""
    store = stores[which]
    expected = _outcome(program, late, nullcontext(), lambda: None)
    if resident:
        assert _outcome(program, late, keep_resident(), lambda: None) == expected
    assert _outcome(program, late, tiered_offload(store, min_bytes=0), store.flush) == expected
    forget_after_error()
    assert store.stats().live_handles == 0

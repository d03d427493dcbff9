"""PyTorch's operator database, each sample run plainly and with everything that backward needs on disk.

A sample's inputs are copied first, inside the run: saved leaves would stay where they are by design. Nothing but the
graph holds on to inputs and outputs when backward begins, so all that was saved can leave memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_map

from tests.hooks.programs import Bits, bits
from tierstore import TierStore, tiered_offload

__all__ = ["DTYPES", "Case", "cases_of", "differentiable", "is_deterministic", "run"]

DTYPES = (torch.float32, torch.complex64)
Function = Callable[..., Any]
Around = Callable[[], AbstractContextManager[object]]
Outcome = list[Bits | str]


class Case(NamedTuple):
    """One run: what is called, on which sample, how often it is differentiated, and how often backward runs."""

    name: str
    function: Function
    sample: SampleInput
    order: int = 1
    num_backwards: int = 1


def differentiable() -> list[OpInfo]:
    """Every entry of the database that has a backward in one of `DTYPES`."""
    return [op for op in op_db if op.supports_autograd and any(op.supports_dtype(dtype, "cpu") for dtype in DTYPES)]


def cases_of(op: OpInfo, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """All samples; the first ones also with backward run twice, differentiated twice, and in place."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(op.sample_inputs(device, dtype, requires_grad=True))
    for number, sample in enumerate(samples):
        yield Case(f"sample {number}", op.get_op(), sample)
    for number, sample in islice(enumerate(samples), 2):
        yield Case(f"sample {number}, backward twice", op.get_op(), sample, num_backwards=2)
        if op.supports_gradgrad:
            yield Case(f"sample {number}, differentiated twice", op.get_op(), sample, order=2)
    in_place = op.get_inplace()
    if in_place is not None and op.supports_inplace_autograd:
        fitting = ((number, sample) for number, sample in enumerate(samples) if not sample.broadcasts_input)
        for number, sample in islice(fitting, 2):
            yield Case(f"sample {number}, in place", in_place, sample)


def run(case: Case, store: TierStore | None, around: Around = nullcontext) -> Outcome:
    """The bits of the outputs and of the gradients, or the error that PyTorch raised.

    Args:
        store: where saved tensors go; None: nowhere, what `around` makes is in force in its place.
    """
    torch.manual_seed(0)
    enter: Around = around if store is None else lambda: tiered_offload(store, min_bytes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators' own: deprecations, prototypes
        try:
            return _differentiate(case, enter, (lambda: None) if store is None else store.flush)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return [f"{type(error).__name__}: {str(error).splitlines()[0]}"]


def is_deterministic(case: Case, expected: Outcome) -> bool:
    """Whether plain PyTorch gives the same again, wherever its allocator puts things."""
    padding = []
    for number in range(20):
        padding.append(torch.empty(17 * number + 3))
        if run(case, None) != expected:
            return False
    return True


def _differentiate(case: Case, enter: Around, settle: Callable[[], None]) -> Outcome:
    leaves: list[torch.Tensor] = []

    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.requires_grad:
            return _copy(value)
        leaf = _copy(value).requires_grad_()
        leaves.append(leaf)
        return _Copied.apply(leaf) if leaf.layout is torch.strided else leaf.clone()

    sample = case.sample
    with enter():
        arguments = tree_map(fresh, (sample.input, sample.args, sample.kwargs))
        outputs = case.function(arguments[0], *arguments[1], **arguments[2])
        outputs = sample.output_process_fn_grad(outputs)
        del arguments
        outcome, edges, cotangents = _let_go(outputs)
        del outputs
    for _ in range(case.order - 1):
        settle()
        with enter():
            gradients = _gradients(edges, leaves, cotangents, create_graph=True)
            more, edges, cotangents = _let_go(gradients)
            outcome += more
            del gradients
    for number in reversed(range(case.num_backwards)):
        settle()
        gradients = _gradients(edges, leaves, cotangents, retain_graph=number > 0)
        outcome += [bits(gradient) for gradient in gradients]
        del gradients
    return outcome


class _Copied(torch.autograd.Function):
    """A copy with the same geometry, and storage of its own: `clone()` would make it dense."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _copy(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
        return tensor.clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.size(), tensor.stride())
    torch._C._set_conj(copy, tensor.is_conj())
    torch._C._set_neg(copy, tensor.is_neg())
    return copy


def _let_go(outputs: object) -> tuple[Outcome, list[Any], list[torch.Tensor]]:
    """The outputs' bits, and what it takes to differentiate them without keeping them."""
    tensors = [value for value in tree_flatten(outputs)[0] if isinstance(value, torch.Tensor)]
    edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
    cotangents = [torch.randn_like(tensor) for tensor in tensors if tensor.requires_grad]
    return [bits(tensor) for tensor in tensors], edges, cotangents


def _gradients(
    edges: list[Any], leaves: list[torch.Tensor], cotangents: list[torch.Tensor], **options: bool
) -> list[torch.Tensor]:
    if not edges or not leaves:
        return []
    found = torch.autograd.grad(edges, leaves, cotangents, allow_unused=True, **options)
    return [gradient for gradient in found if gradient is not None]

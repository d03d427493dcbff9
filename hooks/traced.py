"""Saved tensors under compiled autograd: unpacking is an operator there, which the traced graph calls.

Compiled autograd traces backward into one graph, with its unpack hooks. A hook that cannot be traced would break that
graph at each saved tensor. The part after a break is called from the part before it, whose frames hold all that was
unpacked so far until backward ends. Operators stay inside the graph: they run when it comes to them, and what they
return is freed after its last use.

The result of an operator belongs to the graph: a compiler may write over it once nothing in the graph needs it any
more, and it must not share memory with anything outside. So the operators return copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tierstore.errors import ModifiedInPlaceError
from tierstore.tensors.layout import Layout, describe
from tierstore.tensors.torch_names import name_of_node, neg_view
from tierstore.tensors.uncompiled import uncompiled

from .living import living_log

_NAMESPACE = __name__.replace(".", "_")
_library = torch.library.Library(_NAMESPACE, "DEF")
_library.define(
    "saved(SymInt log, SymInt index, Tensor? counter, SymInt version,"
    " Device? device, ScalarType dtype, SymInt[] size, SymInt[] stride, SymInt offset) -> Tensor",
    tags=torch.Tag.nondeterministic_seeded,  # not a constant, though its arguments may be
)
_library.define("kept(Tensor tensor, SymInt version) -> Tensor")

_operators = getattr(torch.ops, _NAMESPACE)
traced_saved: Callable[..., torch.Tensor] = _operators.saved.default
traced_kept: Callable[..., torch.Tensor] = _operators.kept.default


def check_unchanged(tensor: torch.Tensor, version: int) -> None:
    """Raise ModifiedInPlaceError if the tensor was changed in place since it had that version."""
    if tensor._version != version:
        raise ModifiedInPlaceError(_in_words(tensor), version, tensor._version, name_of_node())


def _in_words(tensor: torch.Tensor) -> str:
    dtype = str(torch.Tensor.dtype.__get__(tensor)).removeprefix("torch.")  # type: ignore[attr-defined]
    try:
        return f"{dtype} tensor of shape {list(torch.Tensor.size(tensor))}"
    except Exception:  # noqa: BLE001 - nested tensors of no subclass have no sizes; a wrapper's may raise anything
        return f"{dtype} nested tensor" if type(tensor) is torch.Tensor else f"{dtype} {type(tensor).__name__}"


def with_lazy_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """The tensor with those lazy bits set. It can be traced."""
    if conj:
        tensor = tensor.conj()
    return neg_view(tensor) if neg else tensor


@uncompiled
def _saved(
    log: int,
    index: int,
    counter: torch.Tensor | None,
    version: int,
    device: torch.device | None,
    dtype: torch.dtype,
    size: list[int],
    stride: list[int],
    offset: int,
) -> torch.Tensor:
    layout = Layout(dtype, torch.Size(size), tuple(stride), offset, False, False)
    if counter is not None and counter._version != version:
        raise ModifiedInPlaceError(describe(layout), version, counter._version)
    tensor: torch.Tensor = living_log(log).give(index, layout)
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    memory = tensor.as_strided((reach,), (1,), tensor.storage_offset())
    return memory.clone().as_strided(size, stride)


@uncompiled
def _kept(tensor: torch.Tensor, version: int) -> torch.Tensor:
    check_unchanged(tensor, version)
    return tensor.clone()


_library.impl("saved", _saved, "CompositeExplicitAutograd")
_library.impl("kept", _kept, "CompositeExplicitAutograd")
# Else it would be given a copy of a tensor with the lazy neg bit, and the copy's version.
_library.impl("kept", torch.library.fallthrough_kernel, "Negative")


@torch.library.register_fake(f"{_NAMESPACE}::saved", lib=_library)
def _shape_of_saved(*arguments: Any) -> torch.Tensor:
    device, dtype, size, stride, _ = arguments[4:]
    return torch.empty_strided(size, stride, dtype=dtype, device=device or "cpu")


@torch.library.register_fake(f"{_NAMESPACE}::kept", lib=_library)
def _shape_of_kept(tensor: torch.Tensor, version: int) -> torch.Tensor:
    return tensor.clone()

"""The two operators that a divided graph calls: one packs a tensor that forward computed, one gives it to backward.

NOTE [Placeholders]
A compiled forward returns what it saves, and autograd keeps that for the compiled backward. In the place of a large
tensor it keeps a *placeholder*, a tensor without elements, whose storage holds what our pack hook made of the tensor.
So the state goes with the graph. A placeholder has one dimension of size 0 before those of the tensor, and the strides
of the tensor, which the compiler of backward has to know, and which the compiler of forward may have chosen.

Neither operator shares memory with what it is given or gives:

* `pack` takes the memory away from the tensor, which is empty afterwards: a frame of compiled code holds its tensors
  longer than it needs them. To the compiler this is a change in place, after the last use.
* What `unpack` gives belongs to the graph, which may write over it, or return it as a gradient. If backward keeps no
  graph, the memory itself is given away, and the store forgets it; otherwise a copy is given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tierstore.residency.ownership import num_owners
from tierstore.tensors.torch_names import AUTOGRAD, SetExcludeDispatchKeyGuard, current_backward, keeps_graph
from tierstore.tensors.uncompiled import uncompiled

from .below import Packed
from .select import keep

_NAMESPACE = __name__.replace(".", "_")
_library = torch.library.Library(_NAMESPACE, "DEF")
_library.define("pack(Tensor(a!) tensor) -> Tensor")
_library.define("unpack(Tensor placeholder) -> Tensor")

_operators = getattr(torch.ops, _NAMESPACE)
pack_operator: Any = _operators.pack.default
unpack_operator: Any = _operators.unpack.default

_HELD = "_tierstore_packed"
_running = threading.local()
_node_source = torch.empty(0, requires_grad=True)


@contextmanager
def packing_with(pack: Callable[[Any], Packed]) -> Iterator[None]:
    """Inside it, compiled forwards on this thread pack with that function."""
    packs = _running.__dict__.setdefault("packs", [])
    packs.append(pack)
    try:
        yield
    finally:
        packs.pop()


@uncompiled
def _pack(tensor: torch.Tensor) -> torch.Tensor:
    placeholder = _placeholder_of(tensor)
    packs = _running.__dict__.get("packs")
    pack = packs[-1] if packs else keep
    with SetExcludeDispatchKeyGuard(AUTOGRAD, False), torch.enable_grad():  # compiled code runs below autograd
        _node_source.neg()  # a new node: all that was packed before it is settled, NOTE [Not before the kernel]
    setattr(placeholder.untyped_storage(), _HELD, pack(_taken(tensor)))
    return placeholder


@uncompiled
def _unpack(placeholder: torch.Tensor) -> torch.Tensor:
    held = placeholder.untyped_storage().__dict__
    packed: Packed | None = held.get(_HELD)
    if packed is None:
        raise RuntimeError(
            "a tensor that a compiled forward saved in a store is gone: either backward has already run, and failed, "
            "or saved-tensor hooks of others have replaced its placeholder by a copy"
        )
    tensor = packed.unpack()
    if current_backward() == -1 or keeps_graph():
        return _copy(tensor)
    del held[_HELD], packed  # what may refer to the memory still, apart from other owners
    storage = tensor.untyped_storage()
    alone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    alone.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    del tensor  # and what it is a view of
    return alone if _is_whole(alone) and num_owners(storage._cdata) == 1 else _copy(alone)


def _placeholder_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided((0, *tensor.shape), (1, *tensor.stride()), dtype=tensor.dtype, device=tensor.device)


def _tensor_of(placeholder: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        placeholder.shape[1:], placeholder.stride()[1:], dtype=placeholder.dtype, device=placeholder.device
    )


def _taken(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of the given one, which loses it; a copy, where that is only a part of its storage."""
    if not _is_whole(tensor):
        return _copy(tensor)
    taken = tensor.detach()
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return taken


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all that lies in its storage."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = tensor.untyped_storage().nbytes()
    return tensor._base is None and not tensor.storage_offset() and nbytes == reach * tensor.itemsize


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


_library.impl("pack", _pack, "CompositeExplicitAutograd")
_library.impl("unpack", _unpack, "CompositeExplicitAutograd")
torch.library.register_fake(f"{_NAMESPACE}::pack", _placeholder_of, lib=_library)
torch.library.register_fake(f"{_NAMESPACE}::unpack", _tensor_of, lib=_library)

"""Geometry of a tensor over its storage, apart from the bytes.

The store keeps a range of a storage, and is asked for tensors over it. A `Layout` has all that is needed to make such a
tensor exactly: dtype, size, stride, offset, and the lazy conjugate and negative bits."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, reduce, wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from .torch_names import (
    AD_INPLACE_OR_VIEW,
    MODE_KEYS,
    DisableTorchFunction,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    InferenceMode,
    SetExcludeDispatchKeyGuard,
    innermost_transform,
    is_function_mode_on,
    is_key_excluded,
    num_dispatch_modes,
    set_conj,
    set_neg,
    storage_address,
    unchecked_strided,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")

_SPAN_ALIGNMENT_BYTES = 64
"""Spans begin at multiples of this. It is a multiple of every element size, and the alignment of torch's allocator."""


ACCELERATORS = frozenset({"cuda", "xpu"})
"""Accelerators whose streams and events need no device-specific module of torch, and whose host copies overlap."""


def storage_of(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int, int] | None:
    """(storage, address where it begins, version) of a tensor; None: a store cannot keep the tensor.

    It can keep plain strided tensors with bytes of their own, on the CPU or an accelerator. It cannot keep subclasses
    (DTensor, fake), quantized and nested tensors; sparse ones and the wrappers of `torch.func`, which have no storage;
    inference tensors, which have no version counter; meta tensors and the zeros of forward-mode differentiation, which
    have no memory. Every pack calls it."""
    kind = type(tensor)
    if (
        (kind is not torch.Tensor and kind is not torch.nn.Parameter)
        or not (tensor.is_cpu or tensor.device.type in ACCELERATORS)
        or tensor.is_nested
        or tensor.is_quantized
    ):
        return None
    try:  # to test for a version and a storage would take as long as to read them
        version, storage = tensor._version, tensor.untyped_storage()
    except RuntimeError:
        return None
    address = storage_address(tensor)
    return None if not address and storage.nbytes() else (storage, address, version)


_OURS = "_tierstore_slot"


def is_foreign(storage: torch.UntypedStorage) -> bool:
    """Whether the memory has owners that torch does not count: numpy, another process, a mapped file.

    Such a storage cannot be resized, because it was made from a pointer or came from another process, or it is shared.
    Storages over a slot of the store are made from a pointer too; `mark_as_ours` tells them apart. Of storages on an
    accelerator PyTorch says that they are shared, whether they are or not (`THPStorage_isShared`: of CUDA's, and in
    later sources of all). What one of them has sent to another process stays there when it is freed here
    (torch/csrc/CudaIPCTypes.cpp)."""
    is_shared = storage.device.type == "cpu" and storage.is_shared()
    return (is_shared or not storage.resizable()) and _OURS not in storage.__dict__


def mark_as_ours(storage: torch.UntypedStorage) -> None:
    """Note that the storage lies over a slot of the store."""
    storage.__dict__[_OURS] = True


class Layout(NamedTuple):
    """The geometry of a tensor over its storage: stride and offset in elements, and the two lazy bits."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


_GEOMETRY = (
    operator.attrgetter("dtype"),
    torch.Tensor.size,
    torch.Tensor.stride,
    torch.Tensor.storage_offset,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)
_new_layout = partial(tuple.__new__, Layout)
"""NamedTuple's own constructor takes longer than all these calls."""


def layout_of(tensor: torch.Tensor) -> Layout:
    """The geometry of a strided tensor."""
    size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
    return _new_layout((tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg()))


def layouts_of(tensors: Collection[torch.Tensor]) -> list[Layout]:
    """`layout_of` each, without a call of Python for each."""
    return list(map(_new_layout, zip(*[map(get, tensors) for get in _GEOMETRY], strict=True)))


def describe(layout: Layout) -> str:
    """In words, for messages."""
    return f"{str(layout.dtype).removeprefix('torch.')} tensor of shape {list(layout.size)}"


def alias_of(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A detached tensor over the same storage and version counter, without lazy bits; no bytes are read.

    It keeps the storage alive but not the autograd graph: to hold a saved output itself would make a cycle."""
    alias = tensor.detach()
    if layout.conj or layout.neg:
        set_lazy_bits(alias, False, False)
    return alias


def set_lazy_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> None:
    """`conj()` would make a view, whose base `ownership.py` would take for one more owner of the storage."""
    set_conj(tensor, conj)
    set_neg(tensor, neg)


def span_of(layouts: Iterable[Layout], storage_bytes: int) -> tuple[int, int]:
    """The bytes [first, end) of a storage of `storage_bytes` that the layouts can reach, rounded outwards."""
    first, end = storage_bytes, 0
    for layout in layouts:
        if 0 in layout.size:
            continue
        first = min(first, layout.offset * layout.dtype.itemsize)
        end = max(end, _end_of(layout))
    if end <= first:
        return 0, 0
    first -= first % _SPAN_ALIGNMENT_BYTES
    end += -end % _SPAN_ALIGNMENT_BYTES
    return first, min(end, storage_bytes)


def _end_of(layout: Layout) -> int:
    """The byte of the storage at which a tensor with elements ends."""
    reach: int = sum(map(operator.mul, layout.size, layout.stride)) - sum(layout.stride)
    return (layout.offset + reach + 1) * layout.dtype.itemsize


def fits_in_storage(layout: Layout, tensor: torch.Tensor) -> bool:
    """Whether a tensor of that geometry lies within the storage of `tensor`."""
    return 0 in layout.size or _end_of(layout) <= tensor.untyped_storage().nbytes()


_MODES = reduce(operator.or_, map(DispatchKeySet, MODE_KEYS))


def is_inside_modes() -> bool:
    """Whether something on this thread sees or changes operations: see `outside_of_modes`, which costs more."""
    return (
        is_function_mode_on()
        or num_dispatch_modes() > 0
        or is_key_excluded(AD_INPLACE_OR_VIEW)
        or torch.is_inference_mode_enabled()
        or innermost_transform() is not None
    )


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Inside it, operations do what they do on a thread where nobody has set anything.

    For the store's own operations: its caller may be anywhere. The code of a mode, or of a transform of `torch.func`,
    would run under the store's lock, and its results would be kept for other callers. Below autograd (in a dispatch
    mode, in the body of a custom operator) an alias would get a version counter of its own, so that no change in place
    would be found. A tensor that is made in inference mode has no version counter."""
    with (
        ExcludeDispatchKeyGuard(_MODES),
        DisableTorchFunction(),
        InferenceMode(False),  # first: it changes keys
        SetExcludeDispatchKeyGuard(AD_INPLACE_OR_VIEW, False),
    ):
        yield


def unseen_by_modes(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: the function runs `outside_of_modes`."""

    @wraps(function)
    def call(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        if is_inside_modes():
            with outside_of_modes():
                return function(*arguments, **keywords)
        return function(*arguments, **keywords)

    return call


@unseen_by_modes
def detached(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias. It shares the tensor's version counter, wherever it is made, and modes see nothing of it."""
    return tensor.detach()


def is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors have the same geometry over the same storage, lazy bits included."""
    return (
        one.dtype is other.dtype
        and one.is_set_to(other)
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def in_dtype(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole elements of `dtype` in `memory` (uint8, shape [n]); shape [n // itemsize]."""
    nbytes = memory.nbytes
    return memory[: nbytes - nbytes % dtype.itemsize].view(dtype)


def rebuild(source: torch.Tensor, layout: Layout, first_byte: int = 0) -> torch.Tensor:
    """A new tensor of the given geometry over the storage of `source`, sharing its version counter.

    `source` has no lazy bits; its storage begins at byte `first_byte` (a multiple of the element size) of the one that
    `layout` refers to. The views are made by `view` and `as_strided`, never by `set_`: only so they share the counter,
    by which autograd knows of in-place changes."""
    itemsize = layout.dtype.itemsize
    storage_bytes = source.untyped_storage().nbytes()
    if source.dtype == layout.dtype:
        tensor = source
    else:
        whole = storage_bytes - storage_bytes % max(itemsize, source.dtype.itemsize)
        tensor = source.as_strided((whole // source.dtype.itemsize,), (1,), 0).view(layout.dtype)
    tensor = tensor.as_strided(layout.size, layout.stride, layout.offset - first_byte // itemsize)
    if layout.conj or layout.neg:
        set_lazy_bits(tensor, layout.conj, layout.neg)
    return tensor


def rebuild_beyond(source: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What `rebuild` returns, although the storage is too small for it: somebody has emptied it, and may fill it again.

    Until then no kernel may read the tensor. PyTorch does not check that either."""
    tensor: torch.Tensor = torch.ops.aten.alias(source)
    nothing = torch.empty(0, dtype=layout.dtype, device=source.device).set_(source.untyped_storage(), 0, (0,), (1,))
    tensor.data = unchecked_strided(nothing, layout.size, layout.stride, layout.offset)
    if layout.conj or layout.neg:
        set_lazy_bits(tensor, layout.conj, layout.neg)
    return tensor


_memory_view_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view_at.restype = ctypes.py_object
_memory_view_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE of CPython's C API


def memory_at(address: int, nbytes: int, *, writable: bool = False) -> memoryview:
    """A view of foreign memory, uint8, shape [nbytes]. The caller keeps the memory alive while the view is used."""
    view: memoryview = _memory_view_at(address, nbytes, _WRITE if writable else _READ)
    return view.cast("B")

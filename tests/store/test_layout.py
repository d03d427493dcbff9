"""Geometry: what is cut from a storage and put together again is the same tensor."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.tensors.layout import Layout, alias_of, layout_of, memory_at, rebuild, span_of

DTYPES = [torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


@st.composite
def _views(draw: st.DrawFn) -> torch.Tensor:
    """Any strided view, overlapping and empty ones included."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.lists(st.integers(0, 5), max_size=4))
    stride = [draw(st.integers(0, 9)) for _ in size]
    offset = draw(st.integers(0, 200))
    reach = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
    num_elements = offset + reach + 1 + draw(st.integers(0, 50))
    storage = torch.randint(0, 256, (num_elements * dtype.itemsize + draw(st.integers(0, 3)),), dtype=torch.uint8)
    whole = storage[: num_elements * dtype.itemsize].view(dtype)
    view = whole.as_strided(size, stride, offset)
    if dtype.is_complex and draw(st.booleans()):
        view = view.conj()
    if draw(st.booleans()) and dtype is not torch.uint8:
        view = torch._neg_view(view)
    return view


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).flatten().view(torch.uint8)


@settings(max_examples=150, deadline=None)
@given(_views())
def test_cut_and_rebuilt_from_bytes_is_the_same(view: torch.Tensor) -> None:
    layout = layout_of(view)
    storage = _bytes_of(view)
    first, end = span_of([layout], storage.numel())
    restored = storage[first:end].clone()
    result = rebuild(restored, layout, first)
    assert (result.dtype, result.size(), result.stride()) == (view.dtype, view.size(), view.stride())
    assert (result.is_conj(), result.is_neg()) == (view.is_conj(), view.is_neg())
    assert torch.equal(_bits(result), _bits(view))
    if end > first:
        assert result.untyped_storage()._cdata == restored.untyped_storage()._cdata


@settings(max_examples=100, deadline=None)
@given(_views())
def test_rebuilt_from_an_alias_is_the_same_memory(view: torch.Tensor) -> None:
    layout = layout_of(view)
    alias = alias_of(view, layout)
    assert not alias.is_conj()
    assert not alias.is_neg()
    result = rebuild(alias, layout)
    assert layout_of(result) == layout
    assert result.untyped_storage()._cdata == view.untyped_storage()._cdata
    assert torch.equal(_bits(result), _bits(view))


@settings(max_examples=100, deadline=None)
@given(_views())
def test_span_reaches_every_element_and_little_more(view: torch.Tensor) -> None:
    layout, storage_bytes = layout_of(view), view.untyped_storage().nbytes()
    first, end = span_of([layout], storage_bytes)
    assert 0 <= first <= end <= storage_bytes
    assert first % 64 == 0
    if not view.numel():
        assert (first, end) == (0, 0)
        return
    itemsize = layout.dtype.itemsize
    last = layout.offset + sum((n - 1) * step for n, step in zip(layout.size, layout.stride, strict=True))
    assert first <= layout.offset * itemsize < first + 64
    assert (last + 1) * itemsize <= end < (last + 1) * itemsize + 64


@pytest.mark.parametrize("num_int32", range(1, 9))
def test_rebuilt_views_of_wider_and_narrower_elements_share_memory(num_int32: int) -> None:
    base = torch.arange(num_int32, dtype=torch.int32)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128):
        num = num_int32 * 4 // dtype.itemsize
        if not num:
            continue
        alias = base[: num * dtype.itemsize // 4].view(dtype)
        assert torch.equal(rebuild(alias, layout_of(base)), base), f"from {dtype}"
        assert torch.equal(rebuild(base, layout_of(alias)), alias), f"to {dtype}"


def test_rebuilt_share_one_version_counter() -> None:
    source = torch.zeros(400, dtype=torch.uint8)
    float_layout = Layout(torch.float32, (10, 10), (10, 1), 0, False, False)
    byte_layout = Layout(torch.uint8, (5,), (1,), 7, False, False)
    floats, some_bytes = rebuild(source, float_layout), rebuild(source, byte_layout)
    floats.add_(1)
    assert source._version == some_bytes._version == floats._version == 1


def test_alias_keeps_neither_graph_nor_the_saved_tensor() -> None:
    leaf = torch.randn(10, requires_grad=True)
    output = leaf.exp()
    alias = alias_of(output, layout_of(output))
    assert alias.grad_fn is None
    assert not alias.requires_grad
    output.data.add_(0)
    assert alias.data_ptr() == output.data_ptr()


def test_memory_at_reads_and_writes_foreign_memory() -> None:
    buffer = (ctypes.c_char * 10)(*b"0123456789")
    view = memory_at(ctypes.addressof(buffer) + 2, 5)
    assert (bytes(view), view.readonly, view.format) == (b"23456", True, "B")
    memory_at(ctypes.addressof(buffer), 2, writable=True)[:] = b"ab"
    assert bytes(buffer) == b"ab23456789"
    assert len(memory_at(ctypes.addressof(buffer), 0)) == 0

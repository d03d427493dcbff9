"""Every dtype and geometry comes back as it went, through `put` and `get` and through autograd."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.autograd import Function

from tests.conftest import MakeStore
from tests.hooks.programs import LARGE_SIDE, SIDE, bits
from tierstore import TierStore, tiered_offload

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16,
    torch.uint32, torch.uint64, torch.float8_e8m0fnu,
]  # fmt: skip

GEOMETRIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda whole: whole,
    "one element": lambda whole: whole.reshape(-1)[37],
    "empty": lambda whole: whole[:0],
    "empty in the middle": lambda whole: whole[:, 2:2],
    "slice": lambda whole: whole[1:3],
    "odd offset": lambda whole: whole.reshape(-1)[7:101],
    "stepped": lambda whole: whole[:, ::2, 1::3],
    "transposed": lambda whole: whole.transpose(0, 2),
    "expanded": lambda whole: whole[:, :1].expand(4, 50, 30),
    "overlapping": lambda whole: whole.as_strided((10, 12), (3, 2), 11),
}


def tensor_of(dtype: torch.dtype) -> torch.Tensor:
    """Shape [4, 5, 30], any bits that the dtype can have."""
    if dtype is torch.bool:
        return torch.randint(0, 2, (4, 5, 30)).bool()
    return torch.randint(0, 255, (4, 5, 30 * dtype.itemsize), dtype=torch.uint8).view(dtype)


class Check(Function):
    """Saves a tensor, and shows in backward what came back."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, saved: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(saved)
        ctx.seen = seen
        return weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.seen.extend(ctx.saved_tensors)
        return gradient, None, None


def facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.device


def assert_round_trip(store: TierStore, make: Callable[[], torch.Tensor]) -> None:
    """`make` gives a new tensor, always the same."""
    torch.default_generator.manual_seed(1)
    expected = make()
    torch.default_generator.manual_seed(1)
    handle = store.put(make())
    weight, seen = torch.ones((), requires_grad=True), []
    with tiered_offload(store, min_bytes=0):
        torch.default_generator.manual_seed(1)
        output = Check.apply(weight, make(), seen)
    store.flush()
    output.backward()
    for found in (store.get(handle), *seen):
        assert facts(found) == facts(expected)
        assert bits(found) == bits(expected)
        assert not found.requires_grad
    assert len(seen) == 1


@pytest.mark.parametrize(
    "options", [{"codec": "none"}, {"codec": "shuffle-zstd", "inline_bytes": None}, {"host_bytes": "1GiB"}], ids=str
)
def test_any_dtype_and_geometry_same_values_and_strides(make_store: MakeStore, options: dict[str, Any]) -> None:
    store = make_store(**options)
    for dtype, cut in product(DTYPES, GEOMETRIES.values()):
        assert_round_trip(store, lambda cut=cut, dtype=dtype: cut(tensor_of(dtype)))  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_lazy_conjugate_and_negative_bits_kept(store: TierStore, dtype: torch.dtype) -> None:
    for cut in GEOMETRIES.values():
        for lazy in (torch.conj, lambda whole: whole.conj().imag, lambda whole: torch._neg_view(whole.conj())):
            assert_round_trip(store, lambda lazy=lazy, cut=cut: lazy(cut(tensor_of(dtype))))  # type: ignore[misc]


@pytest.mark.parametrize("side", [SIDE, LARGE_SIDE], ids=["in a group", "alone"])
@pytest.mark.parametrize("cut", [torch.conj, lambda whole: whole.conj().imag], ids=["conjugate", "negative"])
def test_tensors_with_lazy_bits_go_to_disk(
    store: TierStore, cut: Callable[[torch.Tensor], torch.Tensor], side: int
) -> None:
    """Also those that the first backward saves for the second: views of what the store has handed out."""
    leaf = torch.randn(side, side, dtype=torch.complex64, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        hidden = leaf * 1
        loss = (cut(hidden) * cut(hidden.sin())).abs().sum()
        del hidden
    store.flush()
    first = store.stats()
    assert first.spilled_bytes == first.packed_bytes > 0
    with tiered_offload(store, min_bytes=0):
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        second_loss = gradient.abs().sum()
        del loss, gradient
    store.flush()
    second_loss.backward()
    second = store.stats()
    assert second.packed_bytes > first.packed_bytes
    assert not any(second.kept_bytes.values())


def test_sizes_around_every_boundary_and_memory_formats_same_bits(make_store: MakeStore) -> None:
    store = make_store(staging_bytes="64KiB", inline_bytes="4KiB")
    for num_elements in (0, 1, 15, 16, 17, 511, 512, 1023, 1024, 1025, 16383, 16385, 300_001):
        assert_round_trip(store, lambda: torch.randn(num_elements))  # noqa: B023 - called at once
        assert_round_trip(store, lambda: torch.randn(num_elements + 3)[3:])  # noqa: B023
    for memory_format in (torch.channels_last, torch.contiguous_format):
        assert_round_trip(store, lambda: torch.randn(2, 3, 5, 7).to(memory_format=memory_format))  # noqa: B023
    assert_round_trip(store, lambda: torch.tensor(float("nan")))
    assert_round_trip(store, lambda: torch.tensor(True))


def test_put_of_an_inference_tensor_as_it_was_then(store: TierStore) -> None:
    """It has no version counter, so a later change could not be told: what was put is what comes back."""
    with torch.inference_mode():
        tensor = torch.full((100,), 3.0)
    handle = store.put(tensor)
    with torch.inference_mode():
        tensor.fill_(7)
    store.flush()
    assert torch.equal(store.get(handle), torch.full((100,), 3.0))

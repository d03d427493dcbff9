"""What a store cannot keep stays in memory: never an error, never a wrong value."""

import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, Around, Settle, assert_same_bits, program_of, run_offloaded, run_plain
from tierstore import ModifiedInPlaceError, TierStore, TierStoreWarning, tiered_offload
from tierstore.testing import SimulatedCopies


class Scale(Function):
    """Multiplies its gradient with a number made of a saved tensor of any kind."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (saved,) = ctx.saved_tensors
        if saved.is_quantized:
            saved = saved.dequantize()
        elif saved.layout is not torch.strided:
            saved = saved.to_dense()
        return gradient * saved.detach().as_subclass(torch.Tensor).sum(), None


class Labelled(torch.Tensor):
    """A subclass that adds nothing."""


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.arange(100.0), 0.5, 3, torch.qint8)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse coo": lambda: torch.eye(SIDE).to_sparse(),
    "mkldnn": lambda: torch.ones(SIDE).to_mkldnn(),
    "subclass": lambda: torch.ones(SIDE).as_subclass(Labelled),
    "quantized": quantized,
    "zero tensor": lambda: torch._efficientzerotensor((SIDE,)),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_unsupported_kind_saved_right_value_and_counted(store: TierStore, make: Callable[[], torch.Tensor]) -> None:
    program = program_of(lambda weight: Scale.apply(weight, make()).sum(), [SIDE])
    assert_same_bits(run_offloaded(program, store), run_plain(program))
    assert store.stats().packed_tensors == 0
    assert store.stats().kept_bytes["unsupported"] > 0


class Shapeless(torch.Tensor):
    """Refuses what a message would like to say of it."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        raise ValueError("no shape")

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        raise ValueError("no dtype")


CHANGES: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object], str]] = {
    "sparse coo": (KINDS["sparse coo"], lambda saved: saved.mul_(2), r"float32 tensor of shape \["),
    "sparse csr": (lambda: torch.eye(SIDE).to_sparse_csr(), lambda saved: saved.mul_(2), r"float32 tensor of shape"),
    "mkldnn": (KINDS["mkldnn"], lambda saved: saved.add_(saved), r"float32 tensor of shape"),
    "quantized": (quantized, lambda saved: saved.copy_(saved), r"qint8 tensor of shape"),
    "meta": (lambda: torch.ones(SIDE, device="meta"), lambda saved: saved.mul_(2), r"float32 tensor of shape"),
    "subclass": (KINDS["subclass"], lambda saved: saved.mul_(2), r"float32 tensor of shape"),
    "shapeless subclass": (
        lambda: torch.ones(SIDE).as_subclass(Shapeless), lambda saved: torch.Tensor.mul_(saved, 2), "float32 tensor of"
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("make", "change", "words"), CHANGES.values(), ids=CHANGES.keys())
def test_unsupported_kind_changed_in_place_refused(
    store: TierStore, make: Callable[[], torch.Tensor], change: Callable[[torch.Tensor], object], words: str
) -> None:
    weight, saved = torch.ones(SIDE, requires_grad=True), make()
    with tiered_offload(store, min_bytes=0):
        loss = Scale.apply(weight, saved).sum()
    change(saved)
    with pytest.raises(ModifiedInPlaceError, match=words):
        loss.backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("layout", "words"), [(torch.strided, "float32 nested tensor"), (torch.jagged, "shape")])
def test_nested_tensors_same_bits(store: TierStore, layout: torch.layout, words: str) -> None:
    """And one that is changed in place is refused."""

    def make(requires_grad: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = [torch.randn(length, 8) for length in (3, 5)]
        nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=requires_grad)
        weight = torch.randn(8, 8, requires_grad=True)
        output = torch.nn.functional.linear(nested, weight).relu()
        return nested, weight, torch.nested.to_padded_tensor(output, 0.0).exp().sum()

    def program(around: Around, settle: Settle) -> list[torch.Tensor | None]:
        with around():
            nested, weight, loss = make(requires_grad=True)
        settle()
        loss.backward()
        return [weight.grad, *nested.grad.unbind()]  # type: ignore[union-attr]

    assert_same_bits(run_offloaded(program, store), run_plain(program))
    with tiered_offload(store, min_bytes=0):
        nested, _, loss = make(requires_grad=False)
    nested.mul_(2)
    with pytest.raises(ModifiedInPlaceError, match=words):
        loss.backward()


@pytest.mark.parametrize("is_fake", [False, True], ids=["meta", "fake"])
def test_tensors_without_bytes_pass_and_nothing_is_stored(store: TierStore, is_fake: bool) -> None:
    with FakeTensorMode() if is_fake else torch.device("meta"):
        with tiered_offload(store, min_bytes=0):
            weight = torch.randn(SIDE, SIDE, requires_grad=True)
            loss = (weight * 2).exp().sum()
        store.flush()
        loss.backward()
    assert weight.grad is not None
    assert weight.grad.shape == (SIDE, SIDE)
    assert store.stats().packed_tensors == 0
    assert store.stats().kept_bytes["unsupported"] > 0


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse product": lambda weight: torch.sparse.mm(torch.eye(SIDE).to_sparse(), weight * 2).exp().sum(),
    "subclass": lambda weight: (
        (weight.as_subclass(Labelled) * 2).exp().mul(weight.as_subclass(Labelled)).sin().as_subclass(torch.Tensor).sum()
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_operations_on_unsupported_tensors_same_bits(
    store: TierStore, loss: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert_same_bits(run_offloaded(program_of(loss), store), run_plain(program_of(loss)))


def _scaled(store: TierStore, saved: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=1):
        loss = (weight * saved).sum()
    loss.backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize(
    ("has_cuda_graphs", "is_on_device", "num_told"), [(True, True, 1), (False, True, 0), (True, False, 0)]
)
def test_outputs_of_replayed_graphs_stay_and_the_user_is_told_once(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, has_cuda_graphs: bool, is_on_device: bool, num_told: int
) -> None:
    """Inductor makes a tensor over the pointer that its graph writes to; here it is numpy's."""
    name = "torch._inductor.cudagraph_trees"
    monkeypatch.delitem(sys.modules, name, raising=False)
    if has_cuda_graphs:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    replayed = torch.from_numpy(numpy.full(SIDE, 3, dtype=numpy.float32))
    with SimulatedCopies() as copies, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = make_store(copies=copies if is_on_device else None)
        for _ in range(2):
            assert torch.equal(_scaled(store, replayed), replayed)
        assert store.stats().kept_bytes["alive elsewhere"] > 0
        store.close()
    told = [each for each in caught if issubclass(each.category, TierStoreWarning)]
    assert len(told) == num_told
    for each in told:
        assert "reduce-overhead" in str(each.message)
        assert each.filename == __file__

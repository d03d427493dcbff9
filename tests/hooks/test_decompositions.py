"""Matrix decompositions and contractions as tensor networks use them: both backwards, and calls chosen one by one."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.autograd import Function

from tests.conftest import MakeStore
from tests.hooks.programs import Around, Results, Settle, assert_same_gradients
from tierstore import keep_resident, tiered_offload

SIDE = 12


class Transfer(Function):
    """Absorb a site into an environment; its backward is made of operations that can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, old: torch.Tensor, bra: torch.Tensor, ket: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(old, bra, ket)
        return torch.einsum("asd,asc->cd", torch.einsum("ab,bsd->asd", old, ket), bra)

    @staticmethod
    def backward(ctx: Any, new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        old, bra, ket = ctx.saved_tensors
        right = torch.einsum("cd,bsd->bsc", new, ket)
        left = torch.einsum("ab,asc->bsc", old, bra)
        from_old = torch.einsum("bsc,asc->ab", right, bra)
        return from_old, torch.einsum("ab,bsc->asc", old, right), torch.einsum("bsc,cd->bsd", left, new)


def test_transfer_written_for_these_tests_is_right() -> None:
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 3), (3, 2, 4), (3, 2, 4))]
    assert torch.autograd.gradcheck(Transfer.apply, inputs)
    assert torch.autograd.gradgradcheck(Transfer.apply, inputs)


@pytest.mark.parametrize("host_bytes", [0, "4KiB", "1GiB"])
def test_function_chosen_call_by_call_gradient_and_hessian_vector_product_same_bits(
    make_store: MakeStore, host_bytes: object
) -> None:
    """Some calls stay whole, of others only the sites go; each kind is counted as what it is."""
    store = make_store(host_bytes=host_bytes)
    num_calls, nbytes = 9, SIDE * 2 * SIDE * 8

    def scope_of(call: int, plain: bool) -> AbstractContextManager[object]:
        if plain or call % 3 == 0:
            return nullcontext()
        if call % 3 == 1:
            return keep_resident()
        return tiered_offload(store, min_bytes=0, select=lambda tensor: tensor.dim() == 3)

    def program(around: Around, settle: Settle) -> Results:
        sites = [torch.randn(SIDE, 2, SIDE, dtype=torch.float64, requires_grad=True) for _ in range(num_calls)]
        vectors = [torch.randn_like(site) for site in sites]
        environment = torch.eye(SIDE, dtype=torch.float64)
        with around():
            for call, site in enumerate(sites):
                unit = site / site.norm()
                with scope_of(call, plain=around is nullcontext):
                    environment = Transfer.apply(environment, unit, unit)
            before = store.stats()
            gradients = torch.autograd.grad(environment.sin().sum(), sites, create_graph=True)
            slope = sum((one * two).sum() for one, two in zip(gradients, vectors, strict=True))
        if around is not nullcontext:
            # Kept: environments and sites of three calls, environments of three more. A site's two parts are one.
            assert before.kept_bytes["selected out"] == 3 * (SIDE * SIDE * 8 + 2 * nbytes) + 3 * SIDE * SIDE * 8
        settle()
        return [*gradients, *torch.autograd.grad(slope, sites)]  # type: ignore[arg-type]

    assert_same_gradients(program, store)
    if host_bytes == 0:
        assert store.stats().restored_bytes > 0
    assert store.stats().live_handles == 0

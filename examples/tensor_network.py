"""A matrix product state is shortened, and a Hessian-vector product goes back through it, in a fraction of the memory.

QR brings the state into canonical form, SVD cuts its bonds, a custom `Function` contracts the network, `eigh` gives
the entanglement of every bond. What is saved for backward, twice, is many times what the store may hold in memory.

    python examples/tensor_network.py [PATH]    # PATH: a directory on the drive for the store; default: /tmp
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from tempfile import gettempdir
from typing import Any

import torch

from tierstore import TierStore, keep_resident, tiered_offload

NUM_SITES, PHYSICAL, BOND, SHORT_BOND = 20, 4, 64, 24
MIB = 2**20
HOST_BYTES = 4 * MIB
Scope = AbstractContextManager[object]


class Transfer(torch.autograd.Function):
    """Absorb one site into the environment: new[c, d] = sum over a, b, s of old[a, b] bra[a, s, c] ket[b, s, d]."""

    @staticmethod
    def forward(ctx: Any, old: torch.Tensor, bra: torch.Tensor, ket: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(old, bra, ket)
        return torch.einsum("asd,asc->cd", torch.einsum("ab,bsd->asd", old, ket), bra)

    @staticmethod
    def backward(ctx: Any, new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        old, bra, ket = ctx.saved_tensors  # what was saved comes back here, from wherever it is
        right = torch.einsum("cd,bsd->bsc", new, ket)
        left = torch.einsum("ab,asc->bsc", old, bra)
        from_old = torch.einsum("bsc,asc->ab", right, bra)
        return from_old, torch.einsum("ab,bsc->asc", old, right), torch.einsum("bsc,cd->bsd", left, new)


def canonical(sites: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same state, up to its norm, with orthonormal sites: QR from left to right."""
    found, rest = [], sites[0].new_ones(1, 1)
    for site in sites:
        grown = torch.einsum("ab,bsc->asc", rest, site)
        isometry, rest = torch.linalg.qr(grown.flatten(0, 1))
        found.append(isometry.reshape(*grown.shape[:2], -1))
        rest = rest / rest.norm()
    return found


def shortened(sites: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The nearest state with bonds of at most `SHORT_BOND`, its sites from right to left: SVD of each."""
    rest = sites[-1].new_ones(1, 1)
    for site in reversed(sites):
        centre = torch.einsum("asb,bc->asc", site, rest)
        left, weights, right = torch.linalg.svd(centre.flatten(1), full_matrices=False)
        yield right[:SHORT_BOND].reshape(-1, *centre.shape[1:])
        rest = left[:, :SHORT_BOND] * (weights[:SHORT_BOND] / weights[:SHORT_BOND].norm())


def loss_of(sites: Sequence[torch.Tensor], choose: Scope, keep: Scope) -> torch.Tensor:
    """The entropy of all bonds of the shortened state, less the logarithm of its overlap with the whole one."""
    exact = canonical(sites)
    short = list(shortened(exact))[::-1]
    overlap = density = entropy = exact[0].new_ones(1, 1)
    for bra, ket in zip(exact, short, strict=True):
        with choose:  # of what this call saves, only the sites go to the store
            overlap = Transfer.apply(overlap, bra, ket)
        with keep:  # and of this one nothing
            density = Transfer.apply(density, ket, ket)
        spectrum = torch.linalg.eigh(density).eigenvalues
        entropy = entropy - (spectrum * spectrum.log()).sum()
    return entropy.sum() - overlap.square().log().sum()


def hessian_vector_product(store: TierStore | None) -> list[torch.Tensor]:
    """The gradient of the loss by all sites, and its Hessian times a vector; plainly if there is no store."""
    torch.manual_seed(0)
    bonds = [min(BOND, PHYSICAL**cut, PHYSICAL ** (NUM_SITES - cut)) for cut in range(NUM_SITES + 1)]
    sites = [torch.randn(left, PHYSICAL, right, requires_grad=True) for left, right in pairwise(bonds)]
    vector = [torch.randn_like(site) for site in sites]
    around = choose = keep = nullcontext()
    if store is not None:
        around = tiered_offload(store, min_bytes="8KiB")
        choose = tiered_offload(store, min_bytes="8KiB", select=lambda tensor: tensor.dim() == 3)
        keep = keep_resident()
    with around:  # the first backward runs inside: what it saves for the second goes to the store as well
        gradients = torch.autograd.grad(loss_of(sites, choose, keep), sites, create_graph=True)
        slope = torch.stack([(one * two).sum() for one, two in zip(gradients, vector, strict=True)]).sum()
    return [tensor.detach() for tensor in (*gradients, *torch.autograd.grad(slope, sites))]


def main(path: str) -> None:
    """Compute the same with and without the store, and compare every bit."""
    torch.set_num_threads(1)  # for matrices as small as these, more threads would only wait for each other
    torch.set_default_dtype(torch.float64)
    plain = hessian_vector_product(None)
    with TierStore(path, host_bytes=HOST_BYTES, staging_bytes="512KiB") as store:
        pairs = zip(plain, hessian_vector_product(store), strict=True)
        same = all(torch.equal(one.view(torch.int64), two.view(torch.int64)) for one, two in pairs)
        stats = store.stats()
    print(f"handed to the store: {stats.packed_bytes / MIB:.1f} MiB; host budget: {HOST_BYTES / MIB:.1f} MiB")
    print(f"ratio of the two: {stats.packed_bytes / HOST_BYTES:.1f}")
    print(f"most held in memory: {stats.host_bytes_peak / MIB:.1f} MiB; on disk: {stats.disk_bytes_peak / MIB:.1f} MiB")
    print(f"kept by choice: {stats.kept_bytes['selected out'] / MIB:.1f} MiB")
    print(f"gradient and Hessian-vector product bitwise identical: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or [gettempdir()]))

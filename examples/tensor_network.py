"""Contract a tensor network whose intermediates exceed memory, and differentiate it twice.

The boundary of a two-dimensional network is contracted row by row; after each row its bonds are cut back by QR and SVD,
and its tensors are scaled by a `torch.autograd.Function` of our own, whose `save_for_backward` goes to disk like
everything else. At the end there is an eigenvalue problem. What is small and cheap is left where it is, chosen per call
with `keep_resident()`, or by the kind of tensor with `select=`.

    python examples/tensor_network.py [PATH]
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch

from tierstore import TierStore, keep_resident, tiered_offload

BOND, ROWS, SITES = 16, 4, 6
HOST_BYTES = 2 * 2**20


class Scale(torch.autograd.Function):
    """Divide a tensor by its norm; the quotient is what backward needs, and what is saved."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """The quotient."""
        norm = torch.linalg.vector_norm(tensor)
        quotient = tensor / norm
        ctx.save_for_backward(quotient, norm)
        return quotient

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """What is along the tensor has no effect."""
        quotient, norm = ctx.saved_tensors
        return (gradient - quotient * (quotient * gradient).sum()) / norm


def cut(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two neighbours with a large bond between them, shapes [a, p, k] and [k, p, b]; the bond becomes BOND."""
    a, p, _ = left.shape
    b = right.shape[2]
    q, r = torch.linalg.qr(left.reshape(a * p, -1))
    u, s, vh = torch.linalg.svd(r @ right.reshape(r.shape[1], p * b), full_matrices=False)
    u, s, vh = u[:, :BOND], s[:BOND].sqrt(), vh[:BOND]
    return (q @ u * s).reshape(a, p, -1), (s[:, None] * vh).reshape(-1, p, b)


def free_energy(bulk: torch.Tensor) -> torch.Tensor:
    """Of a network of the tensor `bulk`, shape [left, up, down, right]; differentiable in it."""
    p = bulk.shape[1]
    boundary = [torch.ones(1, p, 1, dtype=bulk.dtype) for _ in range(SITES)]
    total = bulk.new_zeros(())
    for _ in range(ROWS):
        row = [torch.einsum("apb,lpdr->aldbr", site, bulk) for site in boundary]
        row = [t.reshape(t.shape[0] * t.shape[1], p, -1) for t in row]
        row[0], row[-1] = row[0].sum(0, keepdim=True), row[-1].sum(2, keepdim=True)
        for site in range(SITES - 1):
            row[site], row[site + 1] = cut(row[site], row[site + 1])
        with keep_resident():  # a few numbers per row: not worth a trip to the disk
            total = total + torch.stack([torch.linalg.vector_norm(t).log() for t in row]).sum()
        boundary = [Scale.apply(t) for t in row]
    transfer = torch.einsum("apb,cpd->acbd", boundary[2], boundary[2]).reshape(boundary[2].shape[0] ** 2, -1)
    gram = transfer @ transfer.mT
    values: torch.Tensor = torch.linalg.eigh(gram + torch.diag(torch.arange(len(gram), dtype=gram.dtype))).eigenvalues
    return total + values[-1].log()


def curvature(store: TierStore | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient, and its derivative along itself (a product with the Hessian)."""
    torch.manual_seed(0)
    bulk = torch.rand(8, 8, 8, 8, dtype=torch.float64).requires_grad_()
    if store is None:
        (gradient,) = torch.autograd.grad(free_energy(bulk), bulk, create_graph=True)
    else:
        with tiered_offload(store, min_bytes="16KiB", select=lambda tensor: tensor.ndim > 1):
            (gradient,) = torch.autograd.grad(free_energy(bulk), bulk, create_graph=True)
    (product,) = torch.autograd.grad((gradient * gradient.detach()).sum(), bulk)
    return gradient.detach(), product


def main(path: str) -> None:
    """Compare the offloaded derivatives with plain ones."""
    expected = curvature(None)
    with TierStore(path, host_bytes=HOST_BYTES) as store:
        found = curvature(store)
        stats = store.stats()
    same = all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    print(f"saved tensors: {stats.packed_bytes / HOST_BYTES:.1f} times the host budget of {HOST_BYTES // 2**20} MiB")
    print(f"spilled: {stats.spilled_bytes / 2**20:.1f} MiB")
    print(f"most held in host memory: {stats.host_bytes_peak / 2**20:.1f} MiB")
    print(f"left in place by choice: {stats.kept_bytes['selected out']} bytes")
    print(f"gradient and Hessian product bitwise the same: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else scratch)

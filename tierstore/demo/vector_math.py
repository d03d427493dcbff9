"""Makes a process's first roots, logarithms and sines as exact as its later ones.

NOTE [First calls of MKL]
    PyTorch computes these functions of float32 and float64 tensors on the CPU with MKL; each of its threads computes a
    part of the tensor (`ATen/cpu/vml.h`). MKL chooses a function's kernel at its first call. If several threads make
    that call at once, one part may be computed, that one time, by a kernel of low precision, with errors of some
    thousand units in the last place (pytorch#188792; MKL 2024.2, which is in torch 2.13). `MKL_CBWR` does not change
    that. One thread computes a tensor of a single element, and later calls find the kernel chosen.
"""

from __future__ import annotations

import torch

__all__ = ["choose_vector_kernels"]

_OF_MKL = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.log,
    torch.log10,
    torch.log2,
    torch.sin,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)


def choose_vector_kernels() -> None:
    """Have MKL choose its kernels now, on this thread alone: NOTE [First calls of MKL]. Takes milliseconds."""
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in _OF_MKL:
            function(one)

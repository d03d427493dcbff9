"""Tensors that say what they are: all their bytes follow from a key, so a read is verified without a copy."""

import numpy as np
import torch

__all__ = ["is_payload", "payload"]

_DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float64, torch.int64, torch.complex64)
_MOST_BYTES = 3 * 2**20


def payload(key: int) -> torch.Tensor:
    """The tensor of this key: noise, mostly zeros, or a mask, of 8 bytes to 3 MiB, in some dtype and geometry."""
    chance = np.random.default_rng(key)
    dtype = _DTYPES[int(chance.integers(len(_DTYPES)))]
    num_bytes = int(2 ** chance.uniform(3, np.log2(_MOST_BYTES))) // 16 * 16 + 16
    content = chance.integers(0, 256, num_bytes, np.uint8)
    kind = int(chance.integers(3))
    if kind == 1:
        content[chance.random(num_bytes) < 0.7] = 0
    if kind == 2 or dtype == torch.bool:
        content &= 1
    tensor = torch.from_numpy(content).clone().view(dtype)
    return tensor.view(2, -1).t() if key % 3 == 0 else tensor


def is_payload(tensor: torch.Tensor, key: int) -> bool:
    """Whether it is that tensor, bit for bit."""
    expected = payload(key)
    if tensor.dtype != expected.dtype or tensor.shape != expected.shape or tensor.stride() != expected.stride():
        return False
    both = (each.t() if each.dim() == 2 else each for each in (tensor, expected))
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in both))

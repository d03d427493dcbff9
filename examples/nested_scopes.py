"""Scopes inside scopes: the innermost hooks win, as everywhere in PyTorch.

python examples/nested_scopes.py [PATH]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch.autograd.graph import save_on_cpu

from tierstore import TierStore, keep_resident, tiered_offload

Scope = Callable[[], AbstractContextManager[object]]


def gradient(outer: Scope, inner: Scope, settle: Callable[[], None] = lambda: None) -> torch.Tensor:
    """Of a function whose first half runs under `outer`, and whose second half under `inner` too."""
    torch.manual_seed(0)
    leaf = torch.randn(300, 300, requires_grad=True)
    with ExitStack() as scopes:
        scopes.enter_context(outer())
        hidden = (leaf * 2).sin()
        scopes.enter_context(inner())
        loss = (hidden.exp() * hidden).sum()
    del hidden
    settle()
    loss.backward()
    return leaf.grad  # type: ignore[return-value]


def main(path: str) -> None:
    """Every combination, who stored how much, and whether the gradient is that of plain PyTorch."""
    expected = gradient(nullcontext, nullcontext)
    with TierStore(path, host_bytes=0) as first, TierStore(path, host_bytes=0) as second:

        def offload(store: TierStore) -> Scope:
            return lambda: tiered_offload(store, min_bytes=0)

        def settle() -> None:
            first.flush()
            second.flush()

        combinations: dict[str, tuple[Scope, Scope]] = {
            "offload": (offload(first), nullcontext),
            "offload, keep_resident inside": (offload(first), keep_resident),
            "offload, save_on_cpu inside": (offload(first), save_on_cpu),
            "save_on_cpu, offload inside": (save_on_cpu, offload(first)),
            "offload, another store inside": (offload(first), offload(second)),
        }
        for label, (outer, inner) in combinations.items():
            before = first.stats().packed_tensors, second.stats().packed_tensors
            found = gradient(outer, inner, settle)
            after = first.stats().packed_tensors, second.stats().packed_tensors
            stored = " + ".join(str(one - other) for one, other in zip(after, before, strict=True))
            same = "bitwise the same" if torch.equal(expected, found) else "DIFFERENT"
            print(f"{label}: {stored} tensors stored (first + second store); gradient {same}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else scratch)

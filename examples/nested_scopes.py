"""Scopes in scopes: the innermost saved-tensor hooks save, ours and those of PyTorch alike.

python examples/nested_scopes.py [PATH]    # PATH: a directory on the drive; default: /tmp
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager as Scope
from contextlib import nullcontext
from tempfile import gettempdir

import torch
from torch.autograd.graph import save_on_cpu

from tierstore import TierStore, keep_resident, tiered_offload

SIDE = 256
NewScope = Callable[[], Scope[object]]


def gradient_under(outer: NewScope, inner: NewScope) -> torch.Tensor:
    """Each of the three lines with a comment saves one tensor of 256 KiB."""
    torch.manual_seed(0)
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    hidden = weight * 2
    with outer():
        hidden = hidden.exp()  # by the outer scope
        with inner():
            hidden = hidden.tanh()  # by the inner scope
        hidden = hidden.sigmoid()  # by the outer scope again
    (gradient,) = torch.autograd.grad(hidden.sum(), weight)
    return gradient


def main(path: str) -> None:
    """Nest in all ways; print what each store was handed, and whether the gradient is the plain one."""
    plain = gradient_under(nullcontext, nullcontext)
    print("outer > inner: tensors to store one, tensors to store two, told by store one as kept, gradient")
    with TierStore(path, host_bytes=0) as one, TierStore(path, host_bytes=0) as two:

        def to_one() -> Scope[object]:
            return tiered_offload(one, min_bytes=0)

        def to_two() -> Scope[object]:
            return tiered_offload(two, min_bytes=0)

        nestings: dict[str, tuple[NewScope, NewScope]] = {
            "store one > nothing": (to_one, nullcontext),
            "store one > store two": (to_one, to_two),
            "store one > store one": (to_one, to_one),
            "store one > keep_resident": (to_one, keep_resident),
            "keep_resident > store one": (keep_resident, to_one),
            "store one > save_on_cpu": (to_one, save_on_cpu),
            "save_on_cpu > store one": (save_on_cpu, to_one),
        }
        for label, (outer, inner) in nestings.items():
            before = [(store.stats().packed_tensors, store.stats().kept_bytes["selected out"]) for store in (one, two)]
            same = torch.equal(gradient_under(outer, inner).view(torch.int32), plain.view(torch.int32))
            tensors = [store.stats().packed_tensors - was[0] for store, was in zip((one, two), before, strict=True)]
            resident = (one.stats().kept_bytes["selected out"] - before[0][1]) // 2**10
            verdict = "bitwise identical" if same else "DIFFERENT"
            print(f"{label}: {tensors[0]}, {tensors[1]}, {resident} KiB, {verdict}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or [gettempdir()]))

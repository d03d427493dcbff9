"""`torch.func` beside `tiered_offload`: which of its transforms run inside a scope, and how the others do.

`grad`, `vjp`, `jacrev` and `hessian` refuse to run under any saved-tensor hooks. `keep_resident(hooks=False)` takes
the hooks off for as long as they run; the scope around goes on afterwards.

    python examples/functional_transforms.py [PATH]    # PATH: a directory on the drive; default: /tmp
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from tempfile import gettempdir

import torch
from torch import func

from tierstore import TierStore, keep_resident, tiered_offload

SIDE = 24
Transform = Callable[[torch.Tensor], torch.Tensor]


def energy(point: torch.Tensor) -> torch.Tensor:
    """A smooth function of SIDE numbers."""
    return (torch.outer(point, point).sin().exp() * point).sum()


TRANSFORMS: dict[str, Transform] = {
    "grad": func.grad(energy),
    "vjp": lambda point: func.vjp(torch.sin, point)[1](point)[0],
    "jacrev": func.jacrev(torch.sin),
    "hessian": func.hessian(energy),
    "vmap of grad": lambda point: func.vmap(func.grad(energy))(torch.stack([point, 2 * point])),
    "jvp": lambda point: func.jvp(energy, (point,), (point,))[1],
    "jacfwd": func.jacfwd(energy),
    "vmap": lambda point: func.vmap(energy)(torch.stack([point, 2 * point])),
}


def loss_of(weight: torch.Tensor, transform: Transform, around: AbstractContextManager[None]) -> torch.Tensor:
    """A training loss with a transform in it, as a factor that is not differentiated."""
    hidden = (weight * 2).exp()
    with around:
        factor = transform(hidden.detach()[0]).square().mean()
    return (hidden.sin() * factor).sum()


def main(path: str) -> None:
    """Run each transform plainly, inside a scope, and inside a scope with the hooks off; print what happened."""
    torch.manual_seed(0)
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    refusal: RuntimeError | None = None
    with TierStore(path, host_bytes=0) as store:
        for name, transform in TRANSFORMS.items():
            (plain,) = torch.autograd.grad(loss_of(weight, transform, nullcontext()), weight)
            try:
                with tiered_offload(store, min_bytes=0):
                    loss_of(weight, transform, nullcontext())
                outcome = "runs"
            except RuntimeError as error:
                outcome, refusal = "is refused", error
            with tiered_offload(store, min_bytes=0):
                loss = loss_of(weight, transform, keep_resident(hooks=False))
            store.flush()
            (stored,) = torch.autograd.grad(loss, weight)
            verdict = (
                "bitwise identical" if torch.equal(stored.view(torch.int32), plain.view(torch.int32)) else "DIFFERENT"
            )
            print(f"{name}: {outcome} inside tiered_offload; with keep_resident(hooks=False) gradient {verdict}")
        print(f"restored from disk: {store.stats().restored_bytes // 2**10} KiB")
    if refusal is not None:
        print(f"error: {refusal}")
        print(f"note: {' '.join(refusal.__notes__)}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or [gettempdir()]))

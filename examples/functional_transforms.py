"""`torch.func` beside offloading: its transforms of derivatives run under no saved-tensor hooks.

python examples/functional_transforms.py [PATH]
"""

from __future__ import annotations

import sys
import tempfile

import torch

from tierstore import TierStore, keep_resident, tiered_offload


def energy(values: torch.Tensor) -> torch.Tensor:
    """Some function of a vector."""
    return (values.sin() * values.exp()).sum()


def main(path: str) -> None:
    """A training step whose loss needs a Hessian."""
    torch.manual_seed(0)
    weight = torch.randn(200, 200, requires_grad=True)
    point = torch.randn(8)
    with TierStore(path, host_bytes=0) as store:
        try:
            with tiered_offload(store):
                torch.func.hessian(energy)(point)
        except RuntimeError as error:
            print(f"under a scope: {type(error).__name__}, with the advice:")
            print(f"  {error.__notes__[-1]}")
        with tiered_offload(store, min_bytes=0):
            loss = (weight * 2).tanh().square().mean()
            with keep_resident(hooks=False):
                curvature = torch.func.hessian(energy)(point).diagonal().sum()
                slopes = torch.func.vmap(torch.func.grad(energy))(point.expand(3, -1))
            loss = (loss * curvature).exp().log() + slopes.square().sum()
        store.flush()
        stored = store.stats().packed_tensors
        loss.backward()
    print("inside keep_resident(hooks=False): Hessian and per-sample gradients computed")
    print(f"around it: {stored} tensors stored")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else scratch)

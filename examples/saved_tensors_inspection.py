"""Which saved tensors go to the store, which stay and why, and a look at them as often as one likes.

python examples/saved_tensors_inspection.py [PATH]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import nn

from tierstore import TierStore, tiered_offload


def main(path: str) -> None:
    """Thresholds, a choice by hand, the account of what stayed, and `grad_fn._saved_self`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16), nn.Softmax(-1))
    batch = torch.randn(512, 1024)
    with TierStore(path, host_bytes=0) as store:
        for label, options in {
            "default threshold (1 MiB)": {},
            "everything": {"min_bytes": 0},
            "only wide ones": {"min_bytes": 0, "select": lambda tensor: tensor.shape[-1] >= 1024},
        }.items():
            before = store.stats()
            with tiered_offload(store, **options):  # type: ignore[arg-type]
                loss = model(batch).log().sum()
            store.flush()
            after = store.stats()
            loss.backward()
            del loss
            print(f"{label}: {after.packed_tensors - before.packed_tensors} tensors handed to the store")
        for reason, nbytes in store.stats().kept_bytes.items():
            print(f"left in place, {reason}: {nbytes} bytes")

        leaf = torch.randn(300, 300, requires_grad=True)
        with tiered_offload(store, min_bytes=0):
            angle = leaf * 2
            result = angle.sin()
        expected = angle.detach().clone()
        del angle
        store.flush()
        looks = [result.grad_fn._saved_self for _ in range(3)]  # type: ignore[union-attr]
        same = all(torch.equal(look, expected) for look in looks)
        print(f"grad_fn._saved_self, read {len(looks)} times: {'the same each time' if same else 'DIFFERENT'}")
        result.sum().backward()
        correct = torch.equal(leaf.grad, expected.cos() * 2)  # type: ignore[arg-type]
        print(f"backward after that: {'right' if correct else 'WRONG'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else scratch)

"""Replicas of a model on several threads, as `torch.nn.DataParallel` runs them, over one store.

Saved-tensor hooks belong to a thread: a scope that the main thread enters does nothing for the threads that compute.
A wrapped module enters its scope wherever it is called.

    python examples/replicas_on_threads.py [PATH]
"""

from __future__ import annotations

import sys
import tempfile
import threading

import torch
from torch import nn

from tierstore import TierStore, offload_module, tiered_offload

THREADS = 4


def make_model() -> nn.Module:
    """The same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())])


def forward_on_threads(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """The losses, each computed on a thread of its own."""
    losses: dict[int, torch.Tensor] = {}

    def replica(number: int) -> None:
        losses[number] = model(batches[number]).square().mean()

    threads = [threading.Thread(target=replica, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [losses[number] for number in range(len(batches))]


def gradients(model: nn.Module, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """All losses' gradients, added up in the order of the replicas."""
    return list(torch.autograd.grad(losses, list(model.parameters())))


def main(path: str) -> None:
    """Compare a scope around the threads, which sees nothing, with a module that offloads where it is called."""
    batches = [torch.randn(512, 256, generator=torch.Generator().manual_seed(n)) for n in range(THREADS)]
    model = make_model()
    expected = gradients(model, forward_on_threads(model, batches))
    with TierStore(path, host_bytes=0) as store:
        with tiered_offload(store, min_bytes=0):
            losses = forward_on_threads(model, batches)
        print(f"scope on the main thread: {store.stats().packed_tensors} tensors stored")
        losses = forward_on_threads(offload_module(model, store=store, min_bytes=0), batches)
        store.flush()
        found = gradients(model, losses)
        stats = store.stats()
    same = all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    print(f"wrapped module on {THREADS} threads: {stats.packed_tensors} tensors stored")
    print(f"gradients bitwise the same: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else scratch)

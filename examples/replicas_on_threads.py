"""Replicas on threads of their own, as `torch.nn.parallel.parallel_apply` runs them, over one store.

Saved-tensor hooks belong to the thread that enters them. A scope around the threads therefore does nothing on them;
`offload_module` enters its scope inside forward, on whichever thread runs it.

    python examples/replicas_on_threads.py [PATH]    # PATH: a directory on the drive; default: /tmp
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Sequence
from tempfile import gettempdir

import torch
from torch import nn

from tierstore import TierStore, offload_module, tiered_offload

NUM_REPLICAS, NUM_STEPS, ROWS, WIDTH = 3, 2, 512, 256
MIB = 2**20
HOST_BYTES = 2 * MIB


def parallel_apply(replicas: Sequence[nn.Module], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run each replica on its part of the batch, on a thread of its own; that of torch wants a device for each."""
    losses: list[torch.Tensor] = [torch.empty(())] * len(replicas)
    errors: list[BaseException] = []

    def forward(number: int) -> None:
        try:
            losses[number] = replicas[number](parts[number]).square().mean()
        except BaseException as error:  # noqa: BLE001 - raised below, on the thread that trains
            errors.append(error)

    threads = [threading.Thread(target=forward, args=(number,)) for number in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return losses


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """Train for some steps as `DataParallel` does: replicate, apply, backward, add up the gradients in order."""
    random = torch.Generator().manual_seed(0)
    found: list[torch.Tensor] = []
    for _ in range(NUM_STEPS):
        replicas = [copy.deepcopy(model) for _ in range(NUM_REPLICAS)]  # copies share the scope and its store
        parts = [torch.randn(ROWS, WIDTH, generator=random) for _ in replicas]
        torch.stack(parallel_apply(replicas, parts)).sum().backward()
        with torch.no_grad():
            for parameter, *twins in zip(model.parameters(), *(one.parameters() for one in replicas), strict=True):
                found.append(torch.stack([twin.grad for twin in twins if twin.grad is not None]).sum(0))
                parameter -= 0.1 * found[-1]
    return found


def new_model() -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def main(path: str) -> None:
    """Train plainly, in a scope around the threads, and with offloaded replicas; compare."""
    torch.set_num_threads(1)  # for each operation: the replicas share the cores
    plain = gradients_of(new_model())
    with TierStore(path, host_bytes=HOST_BYTES, staging_bytes="2MiB") as store:
        with tiered_offload(store, min_bytes="64KiB"):
            gradients_of(new_model())
        around = store.stats().packed_tensors
        pairs = zip(plain, gradients_of(offload_module(new_model(), store=store, min_bytes="64KiB")), strict=True)
        same = all(torch.equal(one.view(torch.int32), two.view(torch.int32)) for one, two in pairs)
        stats = store.stats()
    print(f"replicas, each on a thread of its own: {NUM_REPLICAS}")
    print(f"tensors stored, scope around the threads: {around}")
    print(f"tensors stored, offload_module: {stats.packed_tensors - around}")
    print(f"handed to the store: {stats.packed_bytes / MIB:.1f} MiB; host budget: {HOST_BYTES / MIB:.1f} MiB")
    print(f"most held in memory: {stats.host_bytes_peak / MIB:.1f} MiB; on disk: {stats.disk_bytes_peak / MIB:.1f} MiB")
    print(f"gradients bitwise identical: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or [gettempdir()]))

"""Train through more saved tensors than the machine has memory: as many as the drive holds.

python examples/larger_than_memory.py [PATH] [--size 50GiB]    # PATH: on the drive; default: /tmp

Each step of `y = sin(y * a)` saves two tensors of the size of `y`. Nothing is computed again. The gradient of the first
values is compared with one that a plain graph over these values alone gives.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from tempfile import gettempdir

import torch

from tierstore import TierStore, tiered_offload

GIB = 2**30
NUM_COMPARED = 4096


def gigabytes(text: str) -> float:
    """A size such as "50GiB" as a number of GiB."""
    return float(text.removesuffix("GiB"))


def chain(values: torch.Tensor, factor: torch.Tensor, steps: int) -> torch.Tensor:
    """Saves two tensors like `values` in each step."""
    for _ in range(steps):
        values = torch.sin(values * factor)
    return values


def main(path: str, size_gib: float, tensor_mib: int) -> None:
    """Go forward and backward through a graph that saves `size_gib`; print what it took."""
    steps = max(1, round(size_gib * 1024 / (2 * tensor_mib)))
    torch.manual_seed(0)
    start = torch.rand(tensor_mib * 2**18, requires_grad=True)
    factor = torch.tensor(1.01, requires_grad=True)

    with TierStore(path, host_bytes="1GiB") as store:
        began = time.perf_counter()
        with tiered_offload(store):
            total = chain(start, factor, steps).sum()
        turned = time.perf_counter()
        total.backward()
        ended = time.perf_counter()
        stats = store.stats()

    few = start.detach()[:NUM_COMPARED].requires_grad_()
    chain(few, factor, steps).sum().backward()
    same = torch.equal(few.grad.view(torch.int32), start.grad[:NUM_COMPARED].view(torch.int32))
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    print(f"saved tensors: {stats.packed_bytes / GIB:.2f} GiB; memory of the machine: {memory_gib:.2f} GiB")
    print(f"most on disk at once: {stats.disk_bytes_peak / GIB:.2f} GiB")
    print(f"most memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB:.2f} GiB")
    print(f"forward: {turned - began:.1f} s; backward: {ended - turned:.1f} s")
    print(f"gradient of the first {NUM_COMPARED} values bitwise identical: {'yes' if same else 'no'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train through more saved tensors than memory holds.")
    parser.add_argument("path", nargs="?", help="a directory on the drive; default: /tmp")
    parser.add_argument("--size", type=gigabytes, default=2.0, help="of all saved tensors, in GiB (default: 2GiB)")
    parser.add_argument("--tensor", type=int, default=128, help="size of each, in MiB (default: 128)")
    given = parser.parse_args()
    main(given.path or gettempdir(), given.size, given.tensor)

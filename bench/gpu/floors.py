"""What no offloading can beat: copies between pinned host memory and the device, and the disk, with nothing beside."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import torch

from .timing import Stopwatch, name_of

_BLOCK_BYTES = 16 * 2**20


def measure_floors(device: torch.device, scratch: Path, *, tiny: bool) -> dict[str, float | str]:
    """Bandwidths in bytes per second, each the best of three."""
    num_bytes = 2**20 if tiny else 2**30
    free = {} if device.type != "cuda" else {"free_bytes": torch.cuda.mem_get_info(device)[0]}
    return {"device": name_of(device)} | free | _copies(device, num_bytes) | _disk(scratch, num_bytes)


def _copies(device: torch.device, num_bytes: int) -> dict[str, float]:
    is_pinned = device.type == "cuda"
    hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
    devices = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def out() -> None:
        hosts[0].copy_(devices[0], non_blocking=True)

    def back() -> None:
        devices[1].copy_(hosts[1], non_blocking=True)

    found = {}
    for name, copy in (("out", out), ("in", back)):
        seconds = []
        for _ in range(3):
            watch = Stopwatch(device)
            watch.mark()
            copy()
            watch.mark()
            seconds += watch.seconds()
        found[f"copy_{name}_bytes_per_second"] = num_bytes / min(seconds)
    return found


def _disk(scratch: Path, num_bytes: int) -> dict[str, float]:
    file, flags = scratch / "floor", os.O_RDWR | os.O_CREAT
    try:
        descriptor, found = os.open(file, flags | os.O_DIRECT, 0o600), {"disk_is_direct": 1.0}
    except OSError:
        descriptor, found = os.open(file, flags, 0o600), {"disk_is_direct": 0.0}
    block_bytes = min(_BLOCK_BYTES, num_bytes)
    with mmap.mmap(-1, block_bytes) as block:
        block[:] = os.urandom(block_bytes)
        try:
            for name, transfer in (("write", os.pwritev), ("read", os.preadv)):
                began = time.perf_counter()
                for offset in range(0, num_bytes, block_bytes):
                    transfer(descriptor, [block], offset)
                found[f"disk_{name}_bytes_per_second"] = num_bytes / (time.perf_counter() - began)
        finally:
            os.close(descriptor)
            file.unlink()
    return found

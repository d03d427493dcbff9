"""What one saved tensor costs the thread that trains, in microseconds, by what becomes of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tierstore import TierStore, tiered_offload

from .timing import wait_for

_NUM_WARM_UP = 4
"""From the third step on the store follows the graph that it knows."""


def measure_saved_tensor(device: torch.device, scratch: Path, *, tiny: bool) -> dict[str, float]:
    """Medians over steps of one graph, the ways by turns; what hooks cost that do nothing is taken off.

    The graph saves 400 tensors of 1 MiB, one for each operation. "stays" is of those that stay on the device: there is
    room for a quarter more, so the hooks stay on. "leaves" is of those that are copied to host memory, "back" of their
    unpacks.
    """
    num_tensors, num_steps = (20, 2) if tiny else (400, 8)
    side = 16 if tiny else 512
    start = torch.full((side, side), 0.5, device=device, requires_grad=True)
    saved_bytes = num_tensors * start.nbytes
    host_bytes = 2 * saved_bytes + 2**20
    with TierStore(scratch, host_bytes=host_bytes) as staying, TierStore(scratch, host_bytes=host_bytes) as leaving:
        ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "nothing": lambda: saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor),
            "stays": lambda: tiered_offload(staying, min_bytes=0, device_bytes=saved_bytes * 5 // 4),
            "leaves": lambda: tiered_offload(leaving, min_bytes=0, device_bytes=0),
        }
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for step in range(_NUM_WARM_UP + num_steps):
            for way, hooks in ways.items():
                taken = _step(start, num_tensors, hooks())
                if step >= _NUM_WARM_UP:
                    seconds[way].append(taken)
            for store in (staying, leaving):
                store._core.residency.slab.wait_until_pinned()
    forward, backward = (
        {way: 1e6 / num_tensors * statistics.median(taken[part] for taken in steps) for way, steps in seconds.items()}
        for part in (0, 1)
    )
    return {
        "nothing_pack_us": forward["nothing"],
        "nothing_unpack_us": backward["nothing"],
        "stays_pack_us": forward["stays"] - forward["nothing"],
        "stays_unpack_us": backward["stays"] - backward["nothing"],
        "leaves_pack_us": forward["leaves"] - forward["nothing"],
        "back_unpack_us": backward["leaves"] - backward["nothing"],
    }


def _step(start: Tensor, num_tensors: int, hooks: AbstractContextManager[Any]) -> tuple[float, float]:
    """How long forward and backward kept the thread that calls them, with nothing queued before either."""
    start.grad = None
    wait_for(start.device)
    began = time.perf_counter()
    result = start
    with hooks:
        for _ in range(num_tensors):
            result = result.sin()
    forward_seconds = time.perf_counter() - began
    loss = result.sum()
    wait_for(start.device)
    began = time.perf_counter()
    loss.backward()
    backward_seconds = time.perf_counter() - began
    wait_for(start.device)
    return forward_seconds, backward_seconds

"""Measures copies between host memory and accelerators, through a slab that is registered like a store's.

torch is imported only if an accelerator's driver has made its device files. Otherwise there is nothing to find.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..base.device_files import has_driver
from ..hardware import AcceleratorLink
from .measurements import AcceleratorState

if TYPE_CHECKING:
    import torch

__all__ = ["measure_accelerators"]

_BUFFER_BYTES = 64 * 2**20


def measure_accelerators(seconds: float, memory_bytes: int) -> AcceleratorState:
    """Look for accelerators, and measure copies both ways on each in turn. Blocks; never fails.

    Args:
        seconds: for all of them together, without the time that drivers take to start.
        memory_bytes: the most that the buffer in host memory may take.
    """
    if not has_driver():
        return AcceleratorState(note="no driver of an accelerator has made device files in /dev")
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return AcceleratorState(note=f"PyTorch {torch.__version__} finds no accelerator that it could use")
    num_devices = torch.accelerator.device_count()
    num_bytes = max(2**20, min(_BUFFER_BYTES, memory_bytes))
    links: list[AcceleratorLink] = []
    for index in range(num_devices):
        try:
            links.append(_link(torch.device(kind.type, index), seconds / num_devices, num_bytes))
        except RuntimeError as error:  # out of memory, in exclusive use, a broken driver
            return AcceleratorState(links=tuple(links), error=f"{kind.type}:{index} cannot be used: {error}")
    return AcceleratorState(links=tuple(links))


def _link(device: torch.device, seconds: float, num_bytes: int) -> AcceleratorLink:
    import torch

    from ..residency.slab import Slab

    with torch.accelerator.device_index(device.index):
        slab = Slab(num_bytes)
        slot = slab.allocate(num_bytes)
        host = slot.as_plain_tensor().fill_(1)
        slab.pin(device)
        try:
            on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device)
            name, memory_bytes = _identity(device)
            return AcceleratorLink(
                name=name,
                memory_bytes=memory_bytes,
                host_memory=slab.description,
                to_host_bytes_per_second=_speed(host, on_device, seconds / 2),
                to_device_bytes_per_second=_speed(on_device, host, seconds / 2),
            )
        finally:
            torch.accelerator.synchronize()
            slab.unpin()
            slab.free(slot)


def _speed(target: torch.Tensor, source: torch.Tensor, seconds: float) -> float:
    """The speed of copies one after the other, in bytes per second."""
    import torch

    target.copy_(source, non_blocking=True)  # the first copy includes set-up in the driver
    torch.accelerator.synchronize()
    began_at = now = time.monotonic()
    num_copies = 0
    while now < began_at + seconds or not num_copies:
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        num_copies += 1
        now = time.monotonic()
    return num_copies * target.nbytes / (now - began_at)


def _identity(device: torch.device) -> tuple[str, int]:
    """The device's name, and its memory in bytes (0 if the backend does not say)."""
    import torch

    backend: Any = getattr(torch, device.type)
    if not hasattr(backend, "get_device_properties"):
        return str(device), 0
    properties: Any = backend.get_device_properties(device)
    return str(properties.name), int(getattr(properties, "total_memory", 0))

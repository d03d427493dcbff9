"""Measures a machine, one thing after the other, in bounded time. `report.py` judges what it finds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.config import available_host_bytes, local_world_size
from ..base.device_files import has_driver
from ..disk.linux import copy_memory
from ..returning.allocator import allocator_of_process
from ..returning.caching import why_none
from . import system
from .codecs import measure_codecs
from .drive import mapped, measure_drive
from .measurements import AcceleratorLink, AcceleratorState, Measurements, Memory

if TYPE_CHECKING:
    import torch

MIB = 2**20
_DRIVE_SHARE, _CODEC_SHARE, _MEMORY_SHARE, _ACCELERATOR_SHARE = 0.7, 0.15, 0.05, 0.1
_BUFFER_SHARE = 8  # buffers take an eighth of the available memory
_LEAST_BUFFER_BYTES, _BUFFER_BYTES, _DEVICE_BUFFER_BYTES = 2 * MIB, 32 * MIB, 64 * MIB


def examine(directory: Path, socket: str | None, seconds: float, daemon_uid: int | None = None) -> Measurements:
    """Measure the drive under `directory`, and the rest of the machine. Blocks.

    No file becomes visible in the directory, and none stays, however the process ends.

    Args:
        socket: where a daemon is looked for; None: in the usual places.
        seconds: for all measurements together. It takes some seconds more, for imports, drivers, and transfers that a
            slow drive still has in flight: at most 15, not counting the start of a GPU's driver.
        daemon_uid: a user whose daemon is trusted, as `check_daemon`'s.

    Raises:
        ConfigError: LOCAL_WORLD_SIZE is no number.
    """
    began_at = time.monotonic()
    trainers = local_world_size() if "LOCAL_WORLD_SIZE" in os.environ else None
    memory_bytes = available_host_bytes() // _BUFFER_SHARE
    processor = system.describe_processor()
    daemon = system.find_daemon(socket, directory, daemon_uid)
    memory = _memory(_MEMORY_SHARE * seconds)
    drive = measure_drive(directory, seconds=_DRIVE_SHARE * seconds, memory_bytes=memory_bytes)
    codecs = measure_codecs(_CODEC_SHARE * seconds)
    accelerators = measure_accelerators(_ACCELERATOR_SHARE * seconds, memory_bytes)
    return Measurements(
        num_trainers=trainers or max(1, len(accelerators.links)),
        seconds=time.monotonic() - began_at,
        drive=drive,
        memory=memory,
        processor=processor,
        limits=system.describe_limits(),
        codecs=codecs,
        accelerators=accelerators,
        daemon=daemon,
    )


# --- host memory ------------------------------------------------------------------------------------------------------


def _memory(seconds: float) -> Memory:
    share = available_host_bytes() // _BUFFER_SHARE // 2 // _LEAST_BUFFER_BYTES * _LEAST_BUFFER_BYTES
    num_bytes = max(_LEAST_BUFFER_BYTES, min(_BUFFER_BYTES, share))
    source, target = mapped(num_bytes), mapped(num_bytes)
    source.write(b"\x5a" * num_bytes)
    target.write(bytes(num_bytes))
    into = memoryview(target)
    allocator = allocator_of_process()
    return Memory(
        **system.memory_figures(),
        copy_bytes_per_second=_speed(lambda: copy_memory(into, memoryview(source)), num_bytes, seconds),
        allocator=allocator.name,
        allocator_left_alone=allocator.left_alone or None,
        no_caching_allocator=why_none(),
    )


def _speed(copy: Callable[[], object], num_bytes: int, seconds: float) -> float:
    copy()  # the first one includes set-up, as in a driver
    began_at, num_copies, used_seconds = time.monotonic(), 0, 0.0
    while used_seconds < seconds or not num_copies:
        copy()
        num_copies += 1
        used_seconds = time.monotonic() - began_at
    return num_copies * num_bytes / used_seconds


# --- accelerators -----------------------------------------------------------------------------------------------------


def measure_accelerators(seconds: float, memory_bytes: int = _DEVICE_BUFFER_BYTES) -> AcceleratorState:
    """Look for accelerators, and measure copies both ways on each in turn, through a slab like a store's. Never fails.

    Blocks for `seconds`, beside the time that drivers take to start. torch is imported only if an accelerator's driver
    has made its device files. `memory_bytes`: the most for the buffer in host memory."""
    if not has_driver():
        return AcceleratorState(note="no driver of an accelerator has made device files in /dev")
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return AcceleratorState(note=f"PyTorch {torch.__version__} finds no accelerator that it could use")
    num_devices = torch.accelerator.device_count()
    num_bytes = max(MIB, min(_DEVICE_BUFFER_BYTES, memory_bytes))
    links: list[AcceleratorLink] = []
    for index in range(num_devices):
        try:
            links.append(_link(torch.device(kind.type, index), seconds / num_devices, num_bytes))
        except RuntimeError as error:  # out of memory, in exclusive use, a broken driver
            return AcceleratorState(links=tuple(links), error=f"{kind.type}:{index} cannot be used: {error}")
    return AcceleratorState(links=tuple(links))


def _link(device: torch.device, seconds: float, num_bytes: int) -> AcceleratorLink:
    import torch

    from ..tensors.copies import queue_copies
    from ..tensors.slab import Slab

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        queue_copies([target], [source], [slot.as_plain_tensor()])
        torch.accelerator.synchronize()

    backend: Any = getattr(torch, device.type)
    has_properties = hasattr(backend, "get_device_properties")
    properties = backend.get_device_properties(device) if has_properties else None
    with torch.accelerator.device_index(device.index):
        slab = Slab(num_bytes)
        slot = slab.allocate(num_bytes)
        host = slot.as_plain_tensor().fill_(1)
        slab.pin(device)
        try:
            on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device)
            return AcceleratorLink(
                name=str(getattr(properties, "name", device)),
                memory_bytes=int(getattr(properties, "total_memory", 0)),
                host_memory=slab.description,
                to_host_bytes_per_second=_speed(lambda: copy(host, on_device), num_bytes, seconds / 2),
                to_device_bytes_per_second=_speed(lambda: copy(on_device, host), num_bytes, seconds / 2),
            )
        finally:
            torch.accelerator.synchronize()
            slab.unpin()
            slab.free(slot)

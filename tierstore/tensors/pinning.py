"""Registration of host memory with an accelerator's driver, on a thread of its own. It takes some 0.2 s for each GiB.

It goes piece by piece, from the lowest address on. Most of the time goes to the pages, which the kernel has to find and
clear, so each piece's are taken first: other threads can launch kernels meanwhile. Then one call registers the piece;
during this call the driver may block other threads. It can stop after each piece when the store closes.

A copy whose memory lies in two registrations is refused, and so is one that lies in a registration in part (CUDA
Runtime API, cudaMemcpyAsync). Pieces meet at multiples of their size, so whoever copies knows where to cut: `pieces`.

Correctness does not depend on it: what is not registered yet is pageable memory, and the host waits for its copies.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..base.threads import start_thread
from ..disk.linux import populate
from ..errors import ConfigError
from .layout import memory_at

_PIECE_BYTES = 256 * 2**20
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def pieces(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a range of host memory begin and end."""
    first, end = address, address + nbytes
    while first < end:
        next_first = min(end, first - first % _PIECE_BYTES + _PIECE_BYTES)
        yield first, next_first
        first = next_first


def is_one_piece(address: int, nbytes: int) -> bool:
    """Whether a range of host memory has to be cut nowhere."""
    return address % _PIECE_BYTES + nbytes <= _PIECE_BYTES


class Pinning:
    """One registration of memory, whose pages may not be moved from now on; it begins at once.

    `register` calls the driver for a piece, of which it gets address and size, and returns why it refused (None: it did
    not); it blocks. The pages are taken near the device, if the system tells what is near.

    Attributes:
        pinned_bytes: how many bytes are registered so far, from the first one on. `registered`: where pieces begin.
        failure: why the rest is not, once `is_over`.
    """

    def __init__(
        self, address: int, size_bytes: int, device: torch.device, register: Callable[[int, int], str | None]
    ) -> None:
        self._address, self._size_bytes = address, size_bytes
        self._device = device
        self._register = register
        self._is_over = threading.Event()
        self._is_unwanted = False
        self.pinned_bytes = 0
        self.registered: list[int] = []
        self.failure: str | None = None
        self._thread: threading.Thread | None = None
        try:
            self._thread = start_thread(self._run, "tierstore-pin")
        except (OSError, ConfigError):  # no more threads: the caller waits
            self._pin()

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    def wait(self) -> None:
        self._is_over.wait()

    def end(self) -> None:
        """Give it up and return when its thread has ended, soon. Registered memory stays registered. Blocks."""
        self._is_unwanted = True
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        """Touch the pages near the device: Linux takes a page from the node of the CPU that touches it (numa(7))."""
        with suppress(OSError):  # a wish: the system may forbid it, and pages may come from anywhere
            if cpus := cpus_near(self._device) & os.sched_getaffinity(0):
                os.sched_setaffinity(0, cpus)  # for this thread alone
        self._pin()

    def _pin(self) -> None:
        try:
            for first, end in pieces(self._address, self._size_bytes):
                self.failure = "the store was closed" if self._is_unwanted else self._pin_piece(first, end - first)
                if self.failure is not None:
                    return
                self.registered.append(first)
                self.pinned_bytes = end - self._address
        except BaseException as error:  # noqa: BLE001 - reported by `failure`
            self.failure = repr(error)
        finally:
            self._is_over.set()

    def _pin_piece(self, address: int, nbytes: int) -> str | None:
        populate(memory_at(address, nbytes, writable=True))
        return self._register(address, nbytes)


def device_in_use() -> torch.device | None:
    """The current device of CUDA, if this process has tensors there already. Opens no context."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        return device if torch.cuda.memory_reserved(device) else None
    except RuntimeError:  # a `CUDAPluggableAllocator` does not tell
        return None


def cpus_near(device: torch.device) -> set[int]:
    """The CPUs of the NUMA node that the device is attached to; empty: the system does not tell."""
    try:
        about: Any = torch.cuda.get_device_properties(device)
        place = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
        text = (_PCI_DEVICES / place / "local_cpulist").read_text(encoding="ascii")  # Documentation/ABI/testing
        ends = [part.partition("-")[::2] for part in text.strip().split(",") if part]  # such as 0-3,8
        return {cpu for first, last in ends for cpu in range(int(first), int(last or first) + 1)}
    except (AttributeError, AssertionError, RuntimeError, OSError, ValueError):
        return set()  # torch was built without these figures or without CUDA, or a container has no sysfs

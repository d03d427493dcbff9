"""Registration of host memory with an accelerator's driver, on a thread of its own. It takes some 0.1 s for each GiB.

Most of that time goes to the pages, which the kernel has to find and clear. So pages are taken first, in steps: other
threads can launch kernels meanwhile, and it can stop after each step when the store closes. Then one call registers all
of them; during this call the driver may block other threads. Several calls would not do: a copy whose memory lies in
two registrations is refused (CUDA Runtime API, cudaMemcpyAsync).

Correctness does not depend on it: until it is over, copies go to and from pageable memory, and the host waits for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..base.threads import start_thread
from ..disk.linux import populate
from ..errors import ConfigError
from .layout import memory_at

_STEP_BYTES = 256 * 2**20
_PCI_DEVICES = Path("/sys/bus/pci/devices")


class Pinning:
    """One registration of memory, whose pages may not be moved from now on; it begins at once.

    `register` calls the driver, and returns why it refused (None: it did not); it blocks. The pages are taken near the
    device, if the system tells what is near. `failure`: why the memory is not registered, once `is_over`."""

    def __init__(self, address: int, size_bytes: int, device: torch.device, register: Callable[[], str | None]) -> None:
        self._address, self._size_bytes = address, size_bytes
        self._device = device
        self._register = register
        self._is_over = threading.Event()
        self._is_unwanted = False
        self.failure: str | None = None
        self._thread: threading.Thread | None = None
        try:
            self._thread = start_thread(self._run, "tierstore-pin")
        except (OSError, ConfigError):  # no more threads: the caller waits
            self._tell_the_driver()

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
        try:
            self._take_pages()
        finally:
            self._tell_the_driver()

    def _take_pages(self) -> None:
        """Touch the pages near the device: Linux takes a page from the node of the CPU that touches it (numa(7))."""
        with suppress(OSError):  # a wish: the system may forbid it, and pages may come from anywhere
            if cpus := cpus_near(self._device) & os.sched_getaffinity(0):
                os.sched_setaffinity(0, cpus)  # for this thread alone
        for start in range(0, self._size_bytes, _STEP_BYTES):
            if self._is_unwanted:
                return
            populate(memory_at(self._address + start, min(_STEP_BYTES, self._size_bytes - start), writable=True))

    def _tell_the_driver(self) -> None:
        try:
            self.failure = "the store was closed" if self._is_unwanted else self._register()
        except BaseException as error:  # noqa: BLE001 - reported by `failure`
            self.failure = repr(error)
        finally:
            self._is_over.set()


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

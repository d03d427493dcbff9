"""The first line of a trace: how the store was opened, and the machine that it runs on."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..base.config import allowed_cores
from .events import FORMAT, VERSION, Header, Machine, StoreSettings

__all__ = ["header_of"]


def header_of(store: StoreSettings) -> Header:
    """A header whose trace begins now."""
    return Header(FORMAT, VERSION, time.perf_counter_ns(), time.time(), os.getpid(), store, _this_machine())


def _this_machine() -> Machine:
    """Describe this machine, without its host name."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    versions = {"linux": platform.release(), "python": platform.python_version()}
    return Machine(
        cpu=model[1] if model else platform.machine(),
        num_cores=len(allowed_cores()),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        versions=versions | {name: _version_of(name) for name in ("torch", "tierstore")},
        launches_block=os.environ.get("CUDA_LAUNCH_BLOCKING") == "1",
    )


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

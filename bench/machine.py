"""The machine and the software in plain words: no names of hosts, no paths."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from tierstore.base.config import version_of
from tierstore.demo.place import file_system_of
from tierstore.tracing.recordings import this_machine


def describe_machine(scratch: Path) -> dict[str, str | int]:
    machine = this_machine()
    return {
        "cpu": machine.cpu,
        "cores": machine.num_cores,
        "memory_bytes": machine.memory_bytes,
        "disk": _disk_under(scratch),
        "file_system": file_system_of(scratch),
    }


def describe_versions() -> dict[str, str]:
    kernel = re.match(r"\d+\.\d+", platform.release())
    names = "tierstore", "tierstore-native", "torch", "numpy", "lmdb", "zstandard"
    packages = {name: version_of(name) or "not installed" for name in names}
    return {"linux": kernel[0] if kernel else "unknown", "python": platform.python_version()} | packages


def _disk_under(directory: Path) -> str:
    """The block device's model, or its driver where it has none, as sysfs(5) shows them."""
    number = directory.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        return "no block device of its own"
    device = device.resolve()
    if (device / "partition").exists():
        device = device.parent
    rotational = (device / "queue/rotational").read_text().strip() == "1"
    model = device / "device/model"
    driver = device / "device/driver"
    if model.exists():
        return f"{model.read_text().strip()} ({'rotating, says the kernel' if rotational else 'solid state'})"
    return f"virtual disk ({driver.resolve().name})" if driver.exists() else device.name

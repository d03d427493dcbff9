"""Tells without torch, which takes a second to import, whether this machine can have an accelerator at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

DEVICE_FILES = ("nvidiactl", "kfd", "dri", "dxg", "accel")
"""Device files in /dev: of NVIDIA, AMD, Intel, Linux under Windows (WSL), and others."""

_FILES_OF_TYPE: Mapping[str, Sequence[str]] = {
    "cuda": ("nvidiactl", "kfd", "dxg"),  # AMD's devices have this name in PyTorch too
    "xpu": ("dri", "dxg"),
    "mps": (),  # only on macOS
}
_FOLDER = Path("/dev")


def has_driver(kind: str | None = None) -> bool:
    """Whether the driver of an accelerator has made its device files; without them, torch finds no such device. `kind`:
    PyTorch's name of the type of device, such as "cuda"; None: of any accelerator."""
    files = DEVICE_FILES if kind is None else _FILES_OF_TYPE.get(kind, DEVICE_FILES)
    return any((_FOLDER / name).exists() for name in files)

"""Tells without torch, which takes a second to import, whether this machine can have an accelerator at all."""

from __future__ import annotations

from pathlib import Path

DEVICE_FILES = ("nvidiactl", "kfd", "dri", "dxg", "accel")
"""Device files in /dev: of NVIDIA, AMD, Intel, Linux under Windows (WSL), and others."""

_FOLDER = Path("/dev")


def has_driver() -> bool:
    """Whether the driver of an accelerator has made its device files; without them, torch finds no device."""
    return any((_FOLDER / name).exists() for name in DEVICE_FILES)

"""What a process has open."""

from __future__ import annotations

import os

__all__ = ["descriptors_of"]


def descriptors_of(process: int | str = "self") -> dict[int, str]:
    """The open descriptors of a process, and what each leads to; without the one that lists them."""
    found = {}
    for name in os.listdir(f"/proc/{process}/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/{process}/fd/{name}")
        except FileNotFoundError:  # closed since
            pass
    return found

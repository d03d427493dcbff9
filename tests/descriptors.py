"""What a process has open."""

import os

__all__ = ["descriptors_of"]


def descriptors_of(process: int | str = "self") -> dict[int, str]:
    """The open descriptors of a process, and what each leads to.

    Without files of /proc and /sys: a thread of the store opens them for a moment, whenever it looks at the memory.
    """
    found = {}
    for name in os.listdir(f"/proc/{process}/fd"):
        try:
            target = os.readlink(f"/proc/{process}/fd/{name}")
        except FileNotFoundError:  # closed since
            continue
        if not target.startswith(("/proc/", "/sys/")):
            found[int(name)] = target
    return found

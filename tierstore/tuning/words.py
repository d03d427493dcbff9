"""Speeds in words."""

from __future__ import annotations

__all__ = ["rate"]


def rate(bytes_per_second: float) -> str:
    """A speed in words, such as "1.21 GB/s": in decimal units, as on data sheets of drives."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_second >= factor:
            return f"{bytes_per_second / factor:.3g} {unit}/s"
    return f"{bytes_per_second:.3g} B/s"

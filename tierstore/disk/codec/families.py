"""The families of codecs. A new one is a file like `bits.py`, and its name in the import here."""

from __future__ import annotations

from . import bits, constant, zstd  # noqa: F401 - each registers what it has
from .family import registered

__all__ = ["FAMILIES"]

FAMILIES = registered

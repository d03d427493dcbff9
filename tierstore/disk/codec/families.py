"""The families of codecs. A new one is a file like `bits.py`, and its name here."""

from __future__ import annotations

from . import bits, constant, zstd

__all__ = ["FAMILIES"]

FAMILIES = {family.name: family for family in (zstd.ZSTD, zstd.SHUFFLE_ZSTD, bits.BITS, constant.CONSTANT)}

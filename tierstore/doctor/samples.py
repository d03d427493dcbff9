"""The kinds of sample data, as a store would see them. `codecs.py` generates the bytes."""

from __future__ import annotations

from collections.abc import Mapping

from ..disk.tier import Kind

__all__ = ["SAMPLE_KINDS"]

SAMPLE_KINDS: Mapping[str, Kind] = {
    "noise": Kind("float32", 4),
    "activations, bfloat16": Kind("bfloat16", 2),
    "activations, float32": Kind("float32", 4),
    "relu outputs": Kind("float32", 4, content="many zeros"),
    "masks": Kind("bool", 1),
    "zeros": Kind("float32", 4, content="all zeros"),
}

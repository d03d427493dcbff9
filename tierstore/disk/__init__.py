"""The disk tier: records (bytes under a key) in a directory. Start at `tier.py`, then `local.py`, `records.py`.
Nothing here knows tensors or torch."""

from .tier import DiskTier, DiskUsage, Kind, Loaded, Stored

__all__ = ["DiskTier", "DiskUsage", "Kind", "Loaded", "Stored"]

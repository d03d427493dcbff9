"""The disk tier: stores records (bytes under a key) in a directory of this machine, and verifies them when it reads.

The engine and the daemon see a `DiskTier` (`tier.py`). Start there, then `local.py` (the parts), `shelf.py` (one
record's path), `records.py` (its jobs). Nothing here knows tensors or torch.
"""

from .tier import DiskTier, DiskUsage, Kind, Loaded, Stored

__all__ = ["DiskTier", "DiskUsage", "Kind", "Loaded", "Stored"]

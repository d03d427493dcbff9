"""The disk tier: stores records (bytes under a key) in a directory of this machine, and verifies them when it reads.

Here: the interface that the engine calls (`DiskTier`), its local form (`LocalDisk`), the files, index and allocation
below it, and the codecs (`codec/`). Not here: the tier that a daemon keeps (`tierstore.sidecar`), tensors, host memory.
The store and the daemon open a `LocalDisk`, or `Drives`; all others see a `DiskTier`. Nothing here knows
tensors or torch.
Start at `tier.py` (the contract), then `local.py` (the parts), `shelf.py` (one record's path), `records.py` (its jobs).
"""

from .tier import DiskTier, DiskUsage, Kind, Loaded, Stored

__all__ = ["DiskTier", "DiskUsage", "Kind", "Loaded", "Stored"]

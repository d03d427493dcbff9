"""The disk tier: records under keys, checked by what was really written."""

from .tier import DiskTier, DiskUsage, Kind, Stored

__all__ = ["DiskTier", "DiskUsage", "Kind", "Stored"]

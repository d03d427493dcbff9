"""A drive of a given speed: the disk tier, slowed down to so many bytes per second, reads and writes together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tierstore.testing import Bandwidth, FaultPlan, FaultyStore, Rule

__all__ = ["open_paced_store"]


def open_paced_store(scratch: Path, bytes_per_second: float, **options: Any) -> FaultyStore:
    """A store in `scratch` whose drive moves no more than that."""
    return FaultyStore(scratch, FaultPlan.of(Rule(("write", "read"), Bandwidth(bytes_per_second))), **options)

"""How many records are in flight by default. The store and the daemon share these numbers."""

from __future__ import annotations

NUM_AT_ONCE = 4
"""Records at the drive, in each direction. One of 16 MiB alone keeps a drive busy; four also cover the gaps between
records."""

NUM_BESIDE_DEVICE = 3
"""How many of the records in flight are not at the drive. They compute checksums, update the index or pass between
threads meanwhile, so the drive is never idle."""

NUM_IN_FLIGHT = NUM_AT_ONCE + NUM_BESIDE_DEVICE
"""Records in flight, in each direction."""

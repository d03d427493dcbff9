"""Numbers of records in flight, and of bytes in transfer, by default. Store, daemon and `tierstore tune` share them."""

from __future__ import annotations

NUM_AT_ONCE = 4
"""Records at the drive, in each direction. One of 16 MiB alone keeps a drive busy; four also cover the gaps between
records."""

NUM_BESIDE_DEVICE = 3
"""How many of the records in flight are not at the drive. They compute checksums, update the index or pass between
threads meanwhile, so the drive is never idle."""

NUM_IN_FLIGHT = NUM_AT_ONCE + NUM_BESIDE_DEVICE
"""Records in flight, in each direction."""

STAGING_BYTES = 112 * 2**20
"""The staging window, where memory is ample."""

LEAST_STAGING_BYTES = 16 * 2**20
"""The staging window, however little memory there is."""


def windows_of(
    available_bytes: int,
    host_bytes: int | None = None,
    staging_bytes: int | None = None,
    most_staging_bytes: int = STAGING_BYTES,
) -> tuple[int, int]:
    """Host and staging window: what is given, else a quarter of the available memory, and `most_staging_bytes`.

    Where memory is short, a training needs most of it for itself: staging takes an eighth at most, and host what three
    times staging leaves of a half. So both together take a quarter, of less than eight times `most_staging_bytes`."""
    if staging_bytes is None:
        staging_bytes = min(most_staging_bytes, max(LEAST_STAGING_BYTES, available_bytes // 8))
    if host_bytes is None:
        host_bytes = min(available_bytes // 4, max(available_bytes // 8, available_bytes // 2 - 3 * staging_bytes))
    return host_bytes, staging_bytes

"""Waiting for what nothing announces."""

import time
from collections.abc import Callable

from tierstore import TierStore

__all__ = ["until", "until_empty"]

_SECONDS = 20.0


def until(condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Return when the condition is true; `meanwhile` is called before each further look."""
    ends_at = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < ends_at, "it did not come to that"
        time.sleep(0.001)
        meanwhile()


def until_empty(store: TierStore) -> None:
    """Return when the store holds nothing any more."""

    def is_empty() -> bool:
        now = store.stats()
        return not any((now.host_bytes, now.staging_used_bytes, now.lent_bytes, now.disk_bytes, now.live_handles))

    until(is_empty)

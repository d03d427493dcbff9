"""What users hold: `TierStore`, its options, its statistics, and the engine that moves its bytes.

Start with `tier_store.py`, then `core.py`, which puts a store together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tier_store import TierStore

__all__ = ["TierStore"]


def __getattr__(name: str) -> Any:
    """Imported when it is first used: parts of this package need no torch."""
    if name == "TierStore":
        from .tier_store import TierStore

        return TierStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

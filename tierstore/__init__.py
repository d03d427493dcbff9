"""tierstore: an asynchronous tiered store for the tensors that PyTorch saves for backward.

::

    from tierstore import TierStore, tiered_offload

    with tiered_offload(store=TierStore("/nvme")):
        loss = model(batch).loss
    loss.backward()

Names are resolved when they are first used, so that parts which need no torch never import it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        ConfigError,
        ConfigTypeError,
        CorruptDataError,
        DaemonUnavailableError,
        ModifiedInPlaceError,
        ProtocolError,
        QuotaExceededError,
        StorageIOError,
        StoreBusyError,
        StoreClosedError,
        StoreFullError,
        TierStoreError,
        TierStoreWarning,
        UnsupportedTorchError,
    )
    from .hooks import (
        keep_resident,
        offload_backend,
        offload_module,
        remove_offload,
        selective_checkpoint_contexts,
        tiered_offload,
    )
    from .memory_plan import MemoryPlan, plan_memory
    from .residency.handle import Handle
    from .store.stats import StoreStats
    from .store.tier_store import TierStore

__all__ = [
    "ConfigError",
    "ConfigTypeError",
    "CorruptDataError",
    "DaemonUnavailableError",
    "Handle",
    "MemoryPlan",
    "ModifiedInPlaceError",
    "ProtocolError",
    "QuotaExceededError",
    "StorageIOError",
    "StoreBusyError",
    "StoreClosedError",
    "StoreFullError",
    "StoreStats",
    "TierStore",
    "TierStoreError",
    "TierStoreWarning",
    "UnsupportedTorchError",
    "keep_resident",
    "offload_backend",
    "offload_module",
    "plan_memory",
    "remove_offload",
    "selective_checkpoint_contexts",
    "tiered_offload",
]

__version__ = "0.6.0"

_HOMES = {
    "Handle": ".residency.handle",
    "MemoryPlan": ".memory_plan",
    "StoreStats": ".store.stats",
    "TierStore": ".store.tier_store",
    "keep_resident": ".hooks",
    "offload_backend": ".hooks",
    "offload_module": ".hooks",
    "plan_memory": ".memory_plan",
    "remove_offload": ".hooks",
    "selective_checkpoint_contexts": ".hooks",
    "tiered_offload": ".hooks",
}


if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module(_HOMES.get(name, ".errors"), __name__), name)
        except AttributeError as error:  # Python would say no more than "cannot import name"
            raise ImportError(f"tierstore cannot be imported here: {error}", name=__name__) from error


def __dir__() -> list[str]:
    return __all__

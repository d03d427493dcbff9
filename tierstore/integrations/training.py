"""The store and the scope of one training: opened as it begins, closed as it ends."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.config import check_directory
from ..errors import ConfigError, ConfigTypeError
from ..hooks import tiered_offload
from ..store.tier_store import TierStore

__all__ = ["Training", "TrainingPlan", "Where"]

_LOGGED = (
    "packed_gib",
    "kept_gib",
    "spilled_gib",
    "restored_gib",
    "stall_seconds",
    "prefetch_late",
    "prefetch_missed",
    "host_peak_gib",
    "disk_peak_gib",
    "live_handles",
    "resident_gib",
)

Where = TierStore | str | os.PathLike[str] | Mapping[str, Any]
"""Where a training stores: a directory, a daemon's socket, a TOML file or a mapping like one, or an open store."""


class TrainingPlan:
    """Where trainings store, and how. `begin` opens the store of one.

    Args:
        where: a directory; a daemon's socket (a path that is one, or ends in ".sock"); a TOML file (a path that ends in
            ".toml"), or a mapping like one, as for `TierStore.from_config`; or an open `TierStore`, which stays open.
        store_options: arguments for the store that is opened: those of `TierStore`, or of `TierStore.connect`.
        offload_options: arguments of `tiered_offload`; they replace those of a file.

    Raises:
        ConfigError: `where` is none of these, or `store_options` are no mapping, or are given for an open store.
            Nothing was opened.
    """

    def __init__(
        self, where: Where, store_options: Mapping[str, Any] | None, offload_options: Mapping[str, Any]
    ) -> None:
        if not isinstance(store_options, Mapping | None):
            raise ConfigTypeError("store_options", store_options, "give a mapping of arguments of TierStore, or None")
        if isinstance(where, TierStore) and store_options:
            raise ConfigError(
                "store_options", dict(store_options), "the store is open already: give its options where it is opened"
            )
        if not isinstance(where, TierStore | str | os.PathLike | Mapping):
            raise ConfigTypeError(
                "where", where, "give a directory, a daemon's socket, a TOML file or an open TierStore"
            )
        if isinstance(where, str | os.PathLike) and _kind_of(where) == "directory":
            check_directory(where)
        self._where = where
        self._store_options = dict(store_options or {})
        self._offload_options = dict(offload_options)

    def begin(self) -> Training:
        """Open the store, unless it is open, and make the scope. Raises what `TierStore` and `tiered_offload` raise."""
        where, options = self._where, self._store_options
        if isinstance(where, TierStore):
            return Training(where, tiered_offload(where, **self._offload_options), closes=False)
        kind = "file" if isinstance(where, Mapping) else _kind_of(where)
        if kind == "file":
            store = TierStore.from_config(where, **options)
        elif kind == "socket":
            store = TierStore.connect(where, **options)  # type: ignore[arg-type]
        else:
            store = TierStore(where, **options)  # type: ignore[arg-type]
        try:
            make = tiered_offload.from_config if kind == "file" else _scope_of
            return Training(store, make(store, where, **self._offload_options), closes=True)
        except BaseException:
            store.close()
            raise


class Training:
    """The store and the scope of one training.

    Args:
        store: takes the saved tensors.
        scope: to be entered around each forward.
        closes: the store ends with the training.
    """

    def __init__(self, store: TierStore, scope: tiered_offload, *, closes: bool) -> None:
        self.store = store
        self.scope = scope
        self._closes = closes
        self._last = store.stats()

    def metrics(self) -> dict[str, float]:
        """The numbers of `StoreStats.as_metrics` that tell how a training goes. Totals: since the last call."""
        since, self._last = self._last, self.store.stats()
        metrics = self._last.as_metrics(since)
        return {name: metrics[name] for name in map("tierstore/{}".format, _LOGGED) if name in metrics}

    def summary(self) -> str:
        """One line for people: `StoreStats.summary`. For a store that was open before: all that it has done."""
        return self.store.stats().summary()

    def close(self) -> None:
        """Close the store if it was opened for this training. Idempotent. Raises what `TierStore.close` raises."""
        if self._closes:
            self.store.close()


def _kind_of(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix
    if suffix == ".toml":
        return "file"
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        is_socket = False
    return "socket" if is_socket or suffix == ".sock" else "directory"


def _scope_of(store: TierStore, _: object, **options: Any) -> tiered_offload:
    return tiered_offload(store, **options)

"""The store and the scope of one training: opened as it begins, closed as it ends."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import nn

from ..base.config import SizeLike, check_directory, parse_size
from ..base.config_file import offload_options as options_of_file
from ..errors import ConfigError, ConfigTypeError
from ..hooks.offload import OffloadOptions, tiered_offload
from ..memory_plan import MemoryPlan, plan_memory
from ..store.options import connected_options, local_options
from ..store.tier_store import StoreChanges, TierStore

__all__ = ["Training", "TrainingPlan", "Where", "missing_state_bytes"]

T = TypeVar("T")

_LOGGED = (
    "packed_gib",
    "kept_gib",
    "offloaded_gib",
    "spilled_gib",
    "restored_gib",
    "stall_seconds",
    "prefetch_late",
    "prefetch_missed",
    "host_peak_gib",
    "disk_peak_gib",
    "live_handles",
    "resident_gib",
    "plan_predicted_peak_gib",
    "plan_measured_peak_gib",
)

Where = TierStore | str | os.PathLike[str] | Mapping[str, Any]
"""Where a training stores: a directory, a daemon's socket, a TOML file or a mapping like one, or an open store."""


class TrainingPlan:
    """Where trainings store, and how. `begin` opens the store of one.

    Args:
        where: a directory on the drive; a daemon's socket (a path that is one, or ends in ".sock"); a TOML file (a path
            that ends in ".toml"), or a mapping like one, as for `TierStore.from_config`: the store is opened when the
            training begins, and closed when it ends, by an exception too. Or an open `TierStore`, which stays open.
        store_options: arguments of `TierStore`, or of `TierStore.connect`.
        offload_options: arguments of `tiered_offload`; they replace those of a file. Not together with `limit`. Where
            neither has `device_bytes`, it is 0 for a model that checkpoints (`checkpoints_itself`), and "auto" for
            any other: no training is slowed down by copies that nobody asked for.
        limit: for the peak of a step, such as "6GiB": `plan_memory` decides by the first batch what is kept, stored and
            computed again. None: everything is stored.

    Raises:
        ConfigError: one of these cannot be used. Nothing was opened.
    """

    def __init__(
        self,
        where: Where,
        store_options: Mapping[str, Any] | None,
        offload_options: OffloadOptions,
        limit: SizeLike | None = None,
    ) -> None:
        if limit is not None:
            parse_size(limit, "limit")
        if limit is not None and offload_options:
            raise ConfigError("limit", limit, f"a plan decides what is stored: leave out {', '.join(offload_options)}")
        if not isinstance(store_options, Mapping | None):
            raise ConfigTypeError("store_options", store_options, "give a mapping of arguments of TierStore, or None")
        if isinstance(where, TierStore) and store_options:
            what = "the store is open already: give its options where it is opened"
            raise ConfigError("store_options", dict(store_options), what)
        if not isinstance(where, TierStore | str | os.PathLike | Mapping):
            raise ConfigTypeError(
                "where", where, "give a directory, a daemon's socket, a TOML file or an open TierStore"
            )
        _refuse_unknown(offload_options, OffloadOptions.__annotations__, _options_of("directory"))
        kind = _kind_of(where)
        if kind in _OPENS:
            _refuse_unknown(dict(store_options or {}), _options_of(kind))
        if kind == "directory":
            local_options(check_directory(where), _options_of(kind) | dict(store_options or {}))
        elif kind == "socket":
            connected_options(where, _options_of(kind) | dict(store_options or {}))  # type: ignore[arg-type]
        self._where, self._limit = where, limit
        self._store_options, self._offload_options = dict(store_options or {}), offload_options

    def begin(self) -> Training:
        """Open the store, unless it is open, and make the scope. Raises what `TierStore` and `tiered_offload` raise."""
        where: Any = self._where
        kind, options = _kind_of(where), self._offload_options
        store = where if kind == "store" else _OPENS[kind](where, **self._store_options)

        def scope_of(options: OffloadOptions) -> tiered_offload:
            is_file = kind == "file"
            return tiered_offload.from_config(store, where, **options) if is_file else tiered_offload(store, **options)

        try:
            given = options_of_file(where, options).values if kind == "file" else options
            leaves_choice = "device_bytes" not in given and given.get("prefetch", "learned") == "learned"
            scope = scope_of(options)
            covered = scope_of({**options, "device_bytes": "auto"}) if leaves_choice else scope
        except BaseException:
            if kind != "store":
                store.close()
            raise
        return Training(store, scope, covered, closes=kind != "store", limit=self._limit)


class _NoLossError(Exception):
    """A batch has no loss."""


class Training:
    """The store and the scope of one training. A context manager, which closes it. `scope`: for models that checkpoint,
    `covered`: for others. `closes`: the store with it. `plan`: the memory plan in force, made by the first batch with a
    loss if there is a `limit`."""

    def __init__(
        self,
        store: TierStore,
        scope: tiered_offload,
        covered: tiered_offload,
        *,
        closes: bool,
        limit: SizeLike | None = None,
    ) -> None:
        self.store = store
        self.plan: MemoryPlan | None = None
        self._scope, self._covered, self._closes, self._limit = scope, covered, closes, limit
        self._chosen: tiered_offload | None = None
        self._planned: nn.Module | None = None
        self._last = store.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(ended_by=error)

    def run(
        self,
        compute: Callable[[], T],
        *,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        loss_of: Callable[[T], torch.Tensor | None],
        prints_plan: bool = False,
    ) -> T:
        """Compute a loss, and store what that saves, or follow the plan, which the first call that has a loss makes.

        That takes up to 20 steps, and leaves room for state that the `optimizers` do not have yet. `loss_of` takes the
        loss out of what `compute` returns; None: the batch has none. Raises what `compute` and `plan_memory` raise."""
        if self._limit is not None and self.plan is None:
            with suppress(_NoLossError):
                reserve = sum(map(missing_state_bytes, optimizers))
                self.plan = plan_memory(
                    model, lambda: _loss(loss_of(compute())), store=self.store, limit=self._limit, reserve=reserve
                )
                self._planned = self.plan.apply(model)
                if prints_plan:
                    print(self.plan, flush=True)
        if self.plan is not None:
            return self.plan.watch(compute)
        if self._chosen is None:
            self._chosen = self._scope if checkpoints_itself(model) else self._covered
        with self._chosen:
            return compute()

    def metrics(self) -> dict[str, float]:
        """The numbers of `StoreStats.as_metrics` that tell how a training goes. Totals: since the last call."""
        since, self._last = self._last, self.store.stats()
        metrics = self._last.as_metrics(since)
        return {name: metrics[name] for name in map("tierstore/{}".format, _LOGGED) if name in metrics}

    def summary(self) -> str:
        return self.store.stats().summary()

    def close(self, ended_by: BaseException | None = None) -> None:
        """Remove the plan, and close the store if it was opened for this training. Idempotent.

        Raises what `TierStore.close` and `MemoryPlan.remove` raise; if the training ends by an error, `ended_by`, that
        is told in a note of it instead. The store is closed in any case."""
        try:
            try:
                planned, self._planned = self._planned, None
                if self.plan is not None and planned is not None:
                    self.plan.remove(planned)
            finally:
                if self._closes:
                    self.store.__exit__(None, ended_by, None)
        except Exception as error:
            if ended_by is None:
                raise
            ended_by.add_note(f"tierstore: the end of the training failed too: {type(error).__name__}: {error}")


def checkpoints_itself(model: nn.Module) -> bool:
    """Whether a part of it was told to checkpoint, as transformers tells its layers, and torch's wrapper is made to.
    PyTorch has no public name for that wrapper, so it is known by the name of its class."""
    return any(
        getattr(module, "gradient_checkpointing", False) is True or type(module).__name__ == "CheckpointWrapper"
        for module in model.modules()
    )


def _loss(found: torch.Tensor | None) -> torch.Tensor:
    if found is None:
        raise _NoLossError
    return found


_OPENS: Mapping[str, Callable[..., TierStore]] = {
    "file": TierStore.from_config,
    "socket": TierStore.connect,
    "directory": TierStore,
}


def _options_of(kind: str) -> dict[str, Any]:
    """The options of what opens such a store, with their defaults."""
    if kind == "file":
        return dict.fromkeys(StoreChanges.__annotations__)
    parameters = signature(_OPENS[kind]).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is Parameter.KEYWORD_ONLY}


def _refuse_unknown(given: Mapping[str, Any], allowed: Collection[str], of_store: Collection[str] = ()) -> None:
    for name, value in given.items():
        if name in allowed:
            continue
        if name in of_store:
            what = f"it is an option of the store: give store_options={{{name!r}: {value!r}}}"
        else:
            what = f"there is no such option; there are {', '.join(allowed)}"
        raise ConfigTypeError(name, value, what)


def _kind_of(where: Where) -> str:
    if isinstance(where, TierStore):
        return "store"
    if isinstance(where, Mapping) or Path(where).suffix == ".toml":
        return "file"
    with suppress(OSError):
        if stat.S_ISSOCK(os.stat(where).st_mode):
            return "socket"
    return "socket" if Path(where).suffix == ".sock" else "directory"


def missing_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """About the memory that an optimizer will take with its first step; 0 if it has made one. Two tensors for each
    parameter, as Adam has; as many as the momentum asks for where that is an option, as in SGD."""
    if optimizer.state:
        return 0
    num_bytes = 0
    for group in optimizer.param_groups:
        num_tensors = (1 if group["momentum"] else 0) if "momentum" in group else 2
        num_bytes += num_tensors * sum(parameter.nbytes for parameter in group["params"] if parameter.requires_grad)
    return num_bytes

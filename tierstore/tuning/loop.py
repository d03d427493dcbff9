"""Trials of a training loop in this process, for programs that can call their step as a function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..base.caller import stacklevel_of_user
from ..base.config import SizeLike, check_directory, parse_size
from ..errors import ConfigError, StoreFullError, TierStoreWarning
from ..hooks import tiered_offload
from ..store.tier_store import TierStore
from ..store.trial import announce_trace
from .program import TrialFailedError
from .recording import NUM_WARMUPS
from .settings import TrialSettings, default_settings
from .tune import tune
from .tuned import LEAST_ROUNDS, Tuned


def tune_loop(
    step: Callable[[tiered_offload], object],
    path: str | PathLike[str],
    *,
    host_bytes: SizeLike | None = None,
    device_bytes: SizeLike = 0,
    start: TrialSettings | None = None,
    min_bytes: SizeLike = "1MiB",
    steps: int = 5,
    rounds: int = 5,
    hardware: object = None,
) -> Tuned:
    """Find settings for a training step. Blocks for minutes, while it runs the step a few hundred times.

    ::

        def step(scope):
            with scope:
                loss = model(batch).loss
            loss.backward()

        tuned = tune_loop(step, "/nvme", host_bytes="8GiB")
        Path("tierstore.toml").write_text(tuned.toml)
        store = TierStore.from_config(tuned.config)

    Args:
        step: called on this thread with the scope for its forward. It should do the same each time.
        path: as `TierStore`'s.
        host_bytes: the most that `host_bytes` and `staging_bytes` may be together; None: as in `start`.
        start: the present settings, which others must beat; None: the defaults.
        min_bytes, device_bytes: as `tiered_offload`'s; never varied.
        steps: measured in each trial, after two that are not.
        rounds: how often each candidate is measured at most.
        hardware: has no effect any more, and warns.

    Raises:
        ConfigError: an argument cannot be used.
        TrialFailedError: the step packs nothing, or keeps the graphs of all steps.

    Errors of the step or the store are passed on; the store is closed then. There is one exception: if settings other
    than those recorded first run out of memory, on an accelerator or in the store, only that candidate has failed."""
    for name, number, least in (("steps", steps, 1), ("rounds", rounds, LEAST_ROUNDS)):
        if number < least:
            raise ConfigError(name, number, f"give {least} or more")
    if hardware is not None:
        text = "tune_loop(hardware=...) has no effect any more: leave it out"
        warnings.warn(text, TierStoreWarning, stacklevel=stacklevel_of_user())
    limit_bytes = None if host_bytes is None else parse_size(host_bytes, "host_bytes")
    if start is None and limit_bytes is not None:
        start = default_settings(limit_bytes)
    scope = {"min_bytes": parse_size(min_bytes, "min_bytes"), "device_bytes": device_bytes}
    loop = _Loop(step, steps + NUM_WARMUPS, check_directory(path), start, scope)
    return tune(loop.run, lambda line: None, host_bytes=limit_bytes, rounds=rounds)


@dataclass(frozen=True)
class _Loop:
    """As `Program`, for a `step` that is called `num_steps` times in a trial. `start`: its own settings; `scope`:
    arguments of `tiered_offload` that no trial changes."""

    step: Callable[[tiered_offload], object]
    num_steps: int
    directory: Path
    start: TrialSettings | None
    scope: Mapping[str, Any]

    def run(self, settings: TrialSettings | None, folder: Path) -> None:
        used = self.start if settings is None else settings
        store_options, options = ({}, {}) if used is None else (used.store, used.offload)
        trace = announce_trace(folder, 1)
        try:
            with TierStore(self.directory, **store_options) as store:
                scope = tiered_offload(store, trace=trace, **self.scope, **options)
                recorder = store._core.traces.begin(trace)
                recorder.is_paced = True
                for _ in range(self.num_steps):
                    self.step(scope)
                recorder.tell_times()
        except (torch.OutOfMemoryError, StoreFullError) as error:
            if settings is None:
                raise
            raise TrialFailedError(str(error)) from error

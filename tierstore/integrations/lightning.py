"""`TierStoreCallback`: offloading for the trainer of Lightning.

The scope has to be around `training_step` and nothing else, for which callbacks have no pair of hooks. So the
strategy's `training_step` is wrapped, through which every call of the module's goes. The module itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer

from ..base.config import SizeLike
from ..errors import ConfigError
from ..hooks.offload import OffloadOptions
from .training import Training, TrainingPlan, Where

__all__ = ["TierStoreCallback"]


class TierStoreCallback(Callback):  # type: ignore[misc]
    """Store what `training_step` saves for backward, for as long as `trainer.fit` runs.

    ::

        trainer = Trainer(callbacks=[TierStoreCallback("/nvme")])
        trainer.fit(module, data)

    The store's main numbers (`Training.metrics`) go to the trainer's loggers at its interval (`log_every_n_steps`). The
    process of rank 0 prints one line (`StoreStats.summary`) at the end. Each process of a distributed strategy opens a
    store of its own. Manual optimisation and several calls of `fit` are supported.

    Args:
        where, limit, store_options, **offload_options: as `TrainingPlan`'s. With a `limit`, the plan is printed; the
            first batch is computed up to 20 times for it, and `training_step` must leave backward to Lightning.

    Raises:
        ConfigError: an argument cannot be used. `fit` also raises it, and what `TierStore` raises.
    """

    def __init__(
        self,
        where: Where,
        *,
        limit: SizeLike | None = None,
        store_options: Mapping[str, Any] | None = None,
        **offload_options: Unpack[OffloadOptions],
    ) -> None:
        self._plan, self._limit = TrainingPlan(where, store_options, offload_options, limit), limit
        self._training: Training | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._end(trainer)  # a fit that ended without telling
        if self._limit is not None and not pl_module.automatic_optimization:
            raise ConfigError("limit", self._limit, "a plan needs `training_step` to leave backward to Lightning")
        training = self._training = self._plan.begin()
        step = trainer.strategy.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            return training.run(
                lambda: step(*args, **kwargs),
                model=pl_module,
                optimizers=trainer.optimizers,
                loss_of=lambda computed: computed["loss"] if isinstance(computed, Mapping) else computed,
                prints_plan=trainer.is_global_zero,
            )

        trainer.strategy.training_step = training_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # As Lightning's own DeviceStatsMonitor asks (2.6): no public name tells whether the loggers are told now.
        if self._training is not None and (trainer._logger_connector.should_update_logs or trainer.fast_dev_run):
            pl_module.log_dict(self._training.metrics(), on_step=True, on_epoch=False, batch_size=1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._training is not None and trainer.is_global_zero:
            print(self._training.summary(), flush=True)
        self._end(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lightning calls no `teardown` then."""
        self._end(trainer, exception)

    def _end(self, trainer: Trainer, ended_by: BaseException | None = None) -> None:
        training, self._training = self._training, None
        if training is not None:
            trainer.strategy.__dict__.pop("training_step", None)
            training.close(ended_by)

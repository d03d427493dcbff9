"""`offload_trainer`: offloading for `transformers.Trainer`, and for the trainers made of it, such as TRL's.

A callback sees no forward, runs after those that report, and is not called when a training fails. So three methods of
one trainer are wrapped: `train` opens and closes the store, `compute_loss` runs in the scope, and `log` adds the
store's numbers before anybody reports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, Unpack

import torch
from torch import nn
from transformers import Trainer

from ..base.config import SizeLike
from ..errors import ConfigError, ConfigTypeError
from ..hooks.offload import OffloadOptions
from .training import Training, TrainingPlan, Where

__all__ = ["offload_trainer"]

T = TypeVar("T", bound=Trainer)

_OFFLOADING = "_tierstore_offloading"


def offload_trainer(
    trainer: T,
    where: Where,
    *,
    limit: SizeLike | None = None,
    store_options: Mapping[str, Any] | None = None,
    **offload_options: Unpack[OffloadOptions],
) -> T:
    """Store what a trainer's forward saves for backward, for as long as `trainer.train()` runs.

    ::

        trainer = offload_trainer(Trainer(model, arguments, train_dataset=data), "/nvme")
        trainer.train()

    The store's main numbers (`Training.metrics`) are in each log of the training, so also in `state.log_history` and
    in what reports, such as TensorBoard. The process of rank 0 prints one line (`StoreStats.summary`) when the training
    ends. Under torchrun each rank opens a store of its own.

    Args:
        trainer: a `transformers.Trainer`, or one of a class made of it (TRL's `SFTTrainer`, `DPOTrainer`,
            `GRPOTrainer`). It is returned.
        where, limit, store_options, **offload_options: as `TrainingPlan`'s. With a `limit`, the plan is printed.

    Raises:
        ConfigError: an argument cannot be used; the trainer's own offloading is on, whose hooks would be the innermost;
            it runs replicas on threads (`DataParallel`), where the hooks would not be; or it is offloaded already.
            `train` also raises it, and what `TierStore` raises.
    """
    if not isinstance(trainer, Trainer):
        raise ConfigTypeError("trainer", trainer, "give a transformers.Trainer, or a trainer of a subclass")
    if hasattr(trainer, _OFFLOADING):
        what = "it is offloaded already: make a new one for other options"
        raise ConfigError("trainer", type(trainer).__name__, what)
    _refuse_own_offloading(trainer)
    offloading = _Offloading(trainer, TrainingPlan(where, store_options, offload_options, limit))
    setattr(trainer, _OFFLOADING, offloading)
    for method in (offloading.train, offloading.compute_loss, offloading.log):
        setattr(trainer, method.__name__, method)
    return trainer


def _refuse_own_offloading(trainer: Trainer) -> None:
    arguments = trainer.args
    if getattr(arguments, "activation_offloading", False):  # TRL
        what = "turn it off: the trainer would move the tensors that the store needs"
        raise ConfigError("activation_offloading", True, what)
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        options = getattr(arguments, name, None)
        if isinstance(options, Mapping) and options.get("offload"):
            raise ConfigError(name, options, 'remove "offload": its hooks would be inside those of the store')
    if arguments.n_gpu > 1:
        what = "start it with torchrun: DataParallel runs forward on threads without hooks"
        raise ConfigError("n_gpu", arguments.n_gpu, what)


class _Offloading:
    """What is called in place of three methods of a trainer."""

    def __init__(self, trainer: Trainer, plan: TrainingPlan) -> None:
        self._trainer, self._plan = trainer, plan
        self._training: Training | None = None
        self._train, self._compute_loss, self._log = trainer.train, trainer.compute_loss, trainer.log

    def train(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_own_offloading(self._trainer)
        with self._plan.begin() as training:
            try:
                self._training = training
                result = self._train(*args, **kwargs)
                if self._trainer.is_world_process_zero():
                    print(training.summary(), flush=True)
                return result
            finally:
                self._training = None

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Evaluation saves nothing."""
        if self._training is None or not torch.is_grad_enabled():
            return self._compute_loss(model, *args, **kwargs)
        optimizer = self._trainer.optimizer
        return self._training.run(
            lambda: self._compute_loss(model, *args, **kwargs),
            model=model,
            optimizers=[] if optimizer is None else [getattr(optimizer, "optimizer", optimizer)],
            loss_of=lambda computed: computed[0] if isinstance(computed, tuple) else computed,
            prints_plan=self._trainer.is_world_process_zero(),
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs of evaluation stay as they are."""
        if self._training is not None and "loss" in logs:
            logs |= self._training.metrics()
        self._log(logs, *args, **kwargs)

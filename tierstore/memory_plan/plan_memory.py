"""`plan_memory`: the fastest step within a limit of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..base.config import SizeLike, format_bytes, parse_size
from ..errors import ConfigError, ConfigTypeError
from ..store.tier_store import TierStore
from .agreement import agreed
from .choice import Corrected, TriedDecision, choose
from .decision import Decision
from .meter import Meter, meter_of
from .plan import MemoryPlan
from .prices import Trials, measure_prices
from .ranks import are_several
from .steps import MeasuredStep

__all__ = ["plan_memory"]


def plan_memory(
    model: nn.Module,
    run: Callable[[], torch.Tensor],
    *,
    store: TierStore,
    limit: SizeLike,
    reserve: SizeLike = 0,
) -> MemoryPlan:
    """Decide for each block of a model: keep what it saves for backward, store it, or compute it again.

    ::

        plan = tierstore.plan_memory(model, lambda: model(batch).loss, store=store, limit="6GiB")
        print(plan)
        plan.apply(model)

    Takes thirty to ninety steps of forward and backward, each within the limit as far as that is possible, and leaves
    the model as it was: gradients, buffers and random generators are put back. The decision itself takes seconds.

    Args:
        model: the model; nothing of it may be offloaded yet. On the CPU or one accelerator.
        run: computes the loss of a typical batch, with the model: a tensor of one element. Is called for each step.
        store: an open `TierStore`. On the CPU the plan has it hold nothing in host memory beyond its staging window
            while the plan is applied: what stays in memory is the plan's to decide.
        limit: for the peak of a step: of the resident memory of this process if the model is on the CPU, of the memory
            allocated on the accelerator otherwise.
        reserve: memory of that kind which the program will take later, such as the state of an optimizer that has not
            made a step yet.

    Returns:
        The plan, not yet applied.

    Raises:
        ConfigError: an argument cannot be used; the model saves nothing that could be moved; or the step cannot fit:
            the error says what the least limit is.

    Errors of `run`, of backward and of the store are raised as they are.
    """
    if not isinstance(model, nn.Module):
        raise ConfigTypeError("model", model, "give a torch.nn.Module")
    if not callable(run):
        raise ConfigTypeError("run", run, "give a function that computes the loss")
    if not isinstance(store, TierStore):
        raise ConfigTypeError("store", store, "give an open TierStore")
    limit_bytes, reserve_bytes = parse_size(limit, "limit"), parse_size(reserve, "reserve")
    usable_bytes = limit_bytes - reserve_bytes
    meter = _checked_meter_of(model, limit)
    with Trials(model, run, store, meter, usable_bytes) as trials:
        prices, measured = measure_prices(trials)
        corrected = Corrected(prices, usable_bytes)
        choice = _choose(trials, corrected, usable_bytes, measured)
    if choice is None:
        raise ConfigError("limit", limit, _why_not(corrected, reserve_bytes, meter))
    return MemoryPlan.of(choice, corrected, limit_bytes, reserve_bytes, meter, store)


def _checked_meter_of(model: nn.Module, limit: SizeLike) -> Meter:
    meter = meter_of(next((parameter.device for parameter in model.parameters()), torch.device("cpu")))
    if not meter.can_reset:
        what = f"the peak of the {meter.unit} cannot be measured: /proc/self/clear_refs cannot be written"
        raise ConfigError("limit", limit, what)
    return meter


def _choose(
    trials: Trials, corrected: Corrected, limit_bytes: int, measured: Iterable[tuple[Decision, MeasuredStep]]
) -> TriedDecision | None:
    if are_several():
        decision = corrected.decide()  # all ranks have to take the same number of steps: none is tried
        if corrected.prices.communicates:
            decision = agreed(corrected, decision)
        return None if decision is None else TriedDecision.untried(decision)
    known = [TriedDecision(decision, step) for decision, step in measured]
    return choose(trials, corrected, limit_bytes, known)


def _why_not(corrected: Corrected, reserve_bytes: int, meter: Meter) -> str:
    least = corrected.least()
    least_bytes = 0 if least is None else corrected.needed_bytes(least) + reserve_bytes
    return f"it cannot fit: the least is {format_bytes(least_bytes)} of {meter.unit}"

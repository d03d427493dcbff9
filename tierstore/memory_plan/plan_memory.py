"""`plan_memory`: the fastest step within a limit of memory, decided by prices and verified in a few real steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..base.config import SizeLike, format_bytes, parse_budget, parse_size
from ..errors import ConfigError, ConfigTypeError
from ..store.tier_store import TierStore
from .choice import MOST_STEPS, Chooser
from .contents import contents_of
from .decision import with_margin
from .meter import LimitReachedError, Meter, meter_of
from .plan import MemoryPlan
from .prices import Trials, TriedDecision, are_several, measure_prices


def plan_memory(
    model: nn.Module,
    run: Callable[[], torch.Tensor],
    store: TierStore,
    *,
    limit: SizeLike,
    reserve: SizeLike = 0,
) -> MemoryPlan:
    """Decide for each block of a model: keep what it saves for backward, store it, or compute it again.

    ::

        plan = tierstore.plan_memory(model, lambda: model(batch).loss, store=store, limit="6GiB")
        print(plan)
        plan.apply(model)

    Takes at most 20 steps of forward and backward, and leaves the model as it was: gradients, buffers and random
    generators are put back. Everything is stored at first, and an operator that would take more than the limit is not
    run (one process on the CPU; ranks of several have to take the same steps). The decision itself takes seconds.

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
        ConfigError: an argument cannot be used; the model saves nothing that could be moved, or its blocks exchange
            data between ranks; or the step cannot fit: the error says what the least limit is.

    Errors of `run`, of backward and of the store are raised as they are."""
    _check_types(model, run, store)
    limit_bytes, reserve_bytes = parse_budget(limit, "limit"), parse_size(reserve, "reserve")
    usable_bytes = limit_bytes - reserve_bytes
    meter = _meter_of(model, limit)
    try:
        with Trials(model, run, store, meter, usable_bytes) as trials:
            prices, known = measure_prices(trials)
            chooser = Chooser(prices, usable_bytes, MOST_STEPS - trials.steps.num_taken)
            if are_several():  # all ranks have to take the same number of steps: none is tried
                decision = chooser.decide()
                choice = None if decision is None else TriedDecision.untried(decision)
            else:
                choice = chooser.choose(trials, known)
            least_bytes = chooser.least_bytes() if choice is None else 0
    except LimitReachedError as reached:
        choice, least_bytes = None, with_margin(reached.nbytes)
    if choice is None:
        least = format_bytes(least_bytes + reserve_bytes)
        raise ConfigError("limit", limit, f"it cannot fit: the least is {least} of {meter.unit}")
    contents = contents_of(choice, prices, limit_bytes, reserve_bytes, meter.unit)
    return MemoryPlan(contents, prices, store, trials.steps.num_taken, chooser.seconds)


def _check_types(model: object, run: object, store: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigTypeError("model", model, "give a torch.nn.Module")
    if not callable(run):
        raise ConfigTypeError("run", run, "give a function that computes the loss")
    if not isinstance(store, TierStore):
        raise ConfigTypeError("store", store, "give an open TierStore")


def _meter_of(model: nn.Module, limit: SizeLike) -> Meter:
    meter = meter_of(model)
    if not meter.can_reset:
        what = f"the peak of the {meter.unit} cannot be measured: /proc/self/clear_refs cannot be written"
        raise ConfigError("limit", limit, what)
    return meter

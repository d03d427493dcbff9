"""`plan_memory`: the fastest step within a limit of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..base.config import SizeLike, format_bytes, parse_size
from ..errors import ConfigError, ConfigTypeError
from ..store.tier_store import TierStore
from .choice import Chooser, TriedDecision
from .contents import contents_of
from .decision import with_margin
from .guard import LimitReachedError
from .meter import meter_of
from .plan import MemoryPlan, Planned
from .prices import Trials, are_several, measure_prices


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

    Takes at most 15 steps of forward and backward, and leaves the model as it was: gradients, buffers and random
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
    meter = meter_of(model)
    if not meter.can_reset:
        what = f"the peak of the {meter.unit} cannot be measured: /proc/self/clear_refs cannot be written"
        raise ConfigError("limit", limit, what)
    try:
        with Trials(model, run, store, meter, usable_bytes) as trials:
            prices, measured = measure_prices(trials)
            chooser = Chooser(prices, usable_bytes)
            choice = _choose(trials, chooser, [TriedDecision(decision, step) for decision, step in measured])
            least_bytes = chooser.least_bytes() if choice is None else 0
    except LimitReachedError as reached:
        choice, least_bytes = None, with_margin(reached.nbytes)
    if choice is None:
        least = format_bytes(least_bytes + reserve_bytes)
        raise ConfigError("limit", limit, f"it cannot fit: the least is {least} of {meter.unit}")
    contents = contents_of(choice, prices, limit_bytes, reserve_bytes, meter.unit)
    return MemoryPlan(contents, Planned(prices, store, trials.steps.num_taken, chooser.seconds))


def _choose(trials: Trials, chooser: Chooser, known: Sequence[TriedDecision]) -> TriedDecision | None:
    if not are_several():
        return chooser.choose(trials, known)
    decision = chooser.decide()  # all ranks have to take the same number of steps: none is tried
    return None if decision is None else TriedDecision.untried(decision)

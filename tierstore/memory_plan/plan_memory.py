"""`plan_memory`: the fastest step within a limit of memory, decided by prices and verified in a few real steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..base.config import SizeLike, format_bytes, parse_size
from ..errors import ConfigError, ConfigTypeError
from ..store.tier_store import TierStore
from .contents import contents_of
from .decision import LEAST_MARGIN, Action, Decision, Prices, margin_of, with_margin
from .meter import LimitReachedError, Meter, meter_of
from .plan import MemoryPlan
from .prices import Trials, TriedDecision, are_several, measure_prices

_MARGINS = (1 / 16, LEAST_MARGIN)
"""The share of a limit that a decision leaves free; the second only if nothing else fits. Allocators keep freed memory
until it is short, so a step takes all of the limit, whatever is alive. The thread that returns what is freed needs some
tens of milliseconds on a busy machine, in which a training may take 100 MiB."""
_MOST, _WHOLE, _LESS = 0.94, 1.0, 0.8
"""Shares of the limit to decide for. Heaps have holes, up to a third of what is alive. So the whole limit is used only
if less does not do, or if no memory had to be returned to the system. Where some had to be, to get it back may cost
more than to move a little more."""
_NUM_KEEP, _NUM_FIRST, _NUM_SECOND = 2, 3, 2
"""Steps of a trial. In the first one, the store still learns its order."""


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

    Errors of `run`, of backward and of the store are raised as they are."""
    _check_types(model, run, store)
    limit_bytes, reserve_bytes = parse_size(limit, "limit"), parse_size(reserve, "reserve")
    usable_bytes = limit_bytes - reserve_bytes
    meter = _meter_of(model, limit)
    try:
        with Trials(model, run, store, meter, usable_bytes) as trials:
            prices, known = measure_prices(trials)
            chooser = Chooser(prices, usable_bytes)
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


class Chooser:
    """Decides by prices within a limit. `offset_bytes`: so far was a measured peak beyond the limit above the predicted
    one. `seconds`: that the solver has taken."""

    def __init__(self, prices: Prices, limit_bytes: int) -> None:
        self.prices, self.limit_bytes = prices, limit_bytes
        self.offset_bytes = 0
        self.seconds = 0.0

    def decide(self, share: float = _WHOLE) -> Decision | None:
        """The fastest decision within a share of the limit; None: there is none.

        The store's staging window is narrowed only if nothing else fits into the whole limit."""
        began, decision = time.perf_counter(), None
        ways = [(self.prices, margin) for margin in _MARGINS]
        if share >= _WHOLE and self.prices.spared_bytes:
            ways.append((self.prices.narrow(), LEAST_MARGIN))
        for prices, margin in ways:
            target_bytes = int(share * self.limit_bytes) - margin_of(margin, self.limit_bytes) - self.offset_bytes
            decision = decision or prices.decide(target_bytes)
        self.seconds += time.perf_counter() - began
        return decision

    def least_bytes(self) -> int:
        """The least limit for which there is a decision, with a narrow staging window."""
        least = self.prices.narrow().decide(None)
        return 0 if least is None else with_margin(least.peak_bytes + self.offset_bytes)

    def choose(self, trials: Trials, known: Sequence[TriedDecision]) -> TriedDecision | None:
        """The fastest decision by the prices, if steps stay within the limit with it; None: no such decision was found.
        It is tried. Another one is tried if the first exceeds the limit, or leaves reason to use more or less of it. Of
        both, and of those that are `known`, the one whose steps took least is chosen."""
        keep = self.prices.uniform(Action("keep"))
        if keep.peak_bytes + margin_of(_MARGINS[0], self.limit_bytes) <= self.limit_bytes:  # else it may be killed
            tried = self._tried(trials, keep, _NUM_KEEP)
            if self._fits(tried):
                return tried
        found: list[TriedDecision] = []
        share = _MOST
        for num_steps in (_NUM_FIRST, _NUM_SECOND):
            decision = self.decide(share)
            if decision is None and share < _WHOLE:
                decision = self.decide(share := _WHOLE)
            if decision is None or any(decision.does == choice.decision.does for choice in found):
                break
            found.append(self._tried(trials, decision, num_steps))
            if self._fits(found[-1]):
                share = _LESS if found[-1].measured.returned_bytes else _WHOLE
        return min(filter(self._fits, (*found, *known)), key=lambda choice: choice.measured.seconds, default=None)

    def _fits(self, choice: TriedDecision) -> bool:
        return choice.measured.peak_bytes <= self.limit_bytes

    def _tried(self, trials: Trials, decision: Decision, num_steps: int) -> TriedDecision:
        """A peak above the prediction, but within the limit, is no miss: allocators keep freed memory until it is
        short. Nor is one below it: the next decision may have another reason to be as large as predicted."""
        measured = trials.take(decision, num_steps)
        if measured.peak_bytes > self.limit_bytes:
            self.offset_bytes = max(self.offset_bytes, measured.peak_bytes - decision.peak_bytes)
        return TriedDecision(decision, measured)

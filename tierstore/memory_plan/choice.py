"""Decides by prices, and verifies the decision in a few real steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .decision import LEAST_MARGIN, Decision, margin_of, with_margin
from .menu import Action
from .prices import Prices, Trials
from .steps import MeasuredStep

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


class TriedDecision(NamedTuple):
    """A decision, what its trial measured, and the share of the limit for which it was made."""

    decision: Decision
    measured: MeasuredStep
    share: float = 1.0

    @classmethod
    def untried(cls, decision: Decision) -> TriedDecision:
        return cls(decision, MeasuredStep(decision.step_seconds, decision.peak_bytes))


class Corrected:
    """Prices, and how far predictions by them have missed: a measured peak beyond the limit was `offset_bytes` above
    the predicted one. `share`: of the limit, to decide for. `decision_seconds`: time that the solver has taken."""

    def __init__(self, prices: Prices, limit_bytes: int) -> None:
        self.prices = prices
        self.offset_bytes = 0
        self.decision_seconds = 0.0
        self.share = _WHOLE
        self._limit_bytes = limit_bytes

    def decide(self, share: float | None = None) -> Decision | None:
        """The fastest decision within a share of the limit; None: there is none.

        The store's staging window is narrowed only if nothing else fits into the whole limit.
        """
        prices, began, decision = self.prices, time.perf_counter(), None
        share = self.share if share is None else share
        ways = [(margin, False) for margin in _MARGINS]
        if share >= _WHOLE and prices.costs.spared_bytes:
            ways.append((LEAST_MARGIN, True))
        for margin, is_narrow in ways:
            target_bytes = int(share * self._limit_bytes) - margin_of(margin, self._limit_bytes) - self.offset_bytes
            decision = decision or prices.decide(target_bytes, is_narrow=is_narrow)
        self.decision_seconds += time.perf_counter() - began
        return decision

    def least_bytes(self) -> int:
        """The least limit for which there is a decision, with a narrow staging window."""
        least = self.prices.decide(None, is_narrow=True)
        return 0 if least is None else self.needed_bytes(least)

    def fitting(self, actions: Mapping[str, Action]) -> Decision | None:
        """The decision for an action of each block, if it is within the limit; narrow only if that has to be."""
        for is_narrow in (False, True):
            decision = self.prices.decision_for(actions, is_narrow=is_narrow)
            if decision is not None and self.needed_bytes(decision) <= self._limit_bytes:
                return decision
        return None

    def needed_bytes(self, decision: Decision) -> int:
        return with_margin(decision.peak_bytes + self.offset_bytes)

    def learn_peak(self, decision: Decision, measured: MeasuredStep) -> None:
        """A peak above the prediction, but within the limit, is no miss: allocators keep freed memory until it is
        short. Nor is one below it: the next decision may have another reason to be as large as predicted."""
        if measured.peak_bytes > self._limit_bytes:
            self.offset_bytes = max(self.offset_bytes, measured.peak_bytes - decision.peak_bytes)


def choose(
    trials: Trials, corrected: Corrected, limit_bytes: int, known: Sequence[TriedDecision]
) -> TriedDecision | None:
    """The fastest decision by the prices, if steps stay within the limit with it; None: no such decision was found.

    It is tried. Another one is tried if the first exceeds the limit, or leaves reason to use more or less of it.
    `corrected` keeps to the share of the limit for which the choice was made. `known`: single strategies that were
    measured before. They are the choice if nothing else stays within the limit.
    """
    keep = corrected.prices.uniform(Action("keep"))
    if keep.peak_bytes + margin_of(_MARGINS[0], limit_bytes) <= limit_bytes:  # else the kernel may kill the trial
        tried = TriedDecision(keep, trials.take(keep, corrected.prices, _NUM_KEEP))
        corrected.learn_peak(keep, tried.measured)
        if tried.measured.peak_bytes <= limit_bytes:
            return tried
    found: list[TriedDecision] = []
    share = _MOST
    for num_steps in (_NUM_FIRST, _NUM_SECOND):
        decision = corrected.decide(share)
        if decision is None and share < _WHOLE:
            decision = corrected.decide(share := _WHOLE)
        if decision is None or any(decision.does_the_same(choice.decision) for choice in found):
            break
        measured = trials.take(decision, corrected.prices, num_steps)
        corrected.learn_peak(decision, measured)
        found.append(TriedDecision(decision, measured, share))
        share = _next_share(found[-1], limit_bytes)
    fitting = [choice for choice in found if choice.measured.peak_bytes <= limit_bytes] or [
        choice for choice in known if choice.measured.peak_bytes <= limit_bytes
    ]
    best = min(fitting, key=lambda choice: choice.measured.seconds, default=None)
    if best is not None:
        corrected.share = best.share
    return best


def _next_share(choice: TriedDecision, limit_bytes: int) -> float:
    if choice.measured.peak_bytes > limit_bytes:
        return choice.share
    return _LESS if choice.measured.returned_bytes else _WHOLE

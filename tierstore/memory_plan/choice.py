"""Decides by prices, and verifies the decision in a few real steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from .decision import LEAST_MARGIN, Decision, Prices, margin_of, with_margin
from .menu import Action
from .prices import Trials
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
    """A decision, and what its trial measured."""

    decision: Decision
    measured: MeasuredStep

    @classmethod
    def untried(cls, decision: Decision) -> TriedDecision:
        return cls(decision, MeasuredStep(decision.step_seconds, decision.peak_bytes))


class Chooser:
    """Decides by prices within a limit. `offset_bytes`: so far was a measured peak beyond the limit above the predicted
    one. `seconds`: that the solver has taken."""

    def __init__(self, prices: Prices, limit_bytes: int) -> None:
        self.prices, self.limit_bytes = prices, limit_bytes
        self.offset_bytes = 0
        self.seconds = 0.0

    def decide(self, share: float = _WHOLE) -> Decision | None:
        """The fastest decision within a share of the limit; None: there is none.

        The store's staging window is narrowed only if nothing else fits into the whole limit.
        """
        began, decision = time.perf_counter(), None
        ways = [(margin, False) for margin in _MARGINS]
        if share >= _WHOLE and self.prices.costs.spared_bytes:
            ways.append((LEAST_MARGIN, True))
        for margin, is_narrow in ways:
            target_bytes = int(share * self.limit_bytes) - margin_of(margin, self.limit_bytes) - self.offset_bytes
            decision = decision or self.prices.decide(target_bytes, is_narrow=is_narrow)
        self.seconds += time.perf_counter() - began
        return decision

    def least_bytes(self) -> int:
        """The least limit for which there is a decision, with a narrow staging window."""
        least = self.prices.decide(None, is_narrow=True)
        return 0 if least is None else with_margin(least.peak_bytes + self.offset_bytes)

    def choose(self, trials: Trials, known: Sequence[TriedDecision]) -> TriedDecision | None:
        """The fastest decision by the prices, if steps stay within the limit with it; None: no such decision was found.
        It is tried. Another one is tried if the first exceeds the limit, or leaves reason to use more or less of it. If
        neither fits: the fastest that is `known` to fit."""
        keep = self.prices.uniform(Action("keep"))
        if (
            keep.peak_bytes + margin_of(_MARGINS[0], self.limit_bytes) <= self.limit_bytes
        ):  # else the kernel may kill it
            tried = self._tried(trials, keep, _NUM_KEEP)
            if self._fits(tried):
                return tried
        found: list[TriedDecision] = []
        share = _MOST
        for num_steps in (_NUM_FIRST, _NUM_SECOND):
            decision = self.decide(share)
            if decision is None and share < _WHOLE:
                decision = self.decide(share := _WHOLE)
            if decision is None or any(decision.does_the_same(choice.decision) for choice in found):
                break
            found.append(self._tried(trials, decision, num_steps))
            if self._fits(found[-1]):
                share = _LESS if found[-1].measured.returned_bytes else _WHOLE
        fitting = list(filter(self._fits, found)) or list(filter(self._fits, known))
        return min(fitting, key=lambda choice: choice.measured.seconds, default=None)

    def _fits(self, choice: TriedDecision) -> bool:
        return choice.measured.peak_bytes <= self.limit_bytes

    def _tried(self, trials: Trials, decision: Decision, num_steps: int) -> TriedDecision:
        """A peak above the prediction, but within the limit, is no miss: allocators keep freed memory until it is
        short. Nor is one below it: the next decision may have another reason to be as large as predicted."""
        measured = trials.take(decision, num_steps)
        if measured.peak_bytes > self.limit_bytes:
            self.offset_bytes = max(self.offset_bytes, measured.peak_bytes - decision.peak_bytes)
        return TriedDecision(decision, measured)

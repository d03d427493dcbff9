"""Which decisions are tried, and which of them is followed: what real steps have shown.

Prices come from few steps, and trials follow each other, while the speed of a machine changes. So what is decided by
prices is verified at the end beside each simple strategy, by turns, and the fastest is followed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Sequence

from .decision import LEAST_MARGIN, Action, Decision, Prices, margin_of, with_margin
from .prices import Trials, TriedDecision
from .steps import MeasuredStep

MOST_STEPS = 20
"""That planning takes, with those that measure the prices."""
_MARGINS = (1 / 16, LEAST_MARGIN)
"""The share of a limit that a decision leaves free; the second only if nothing else fits. Allocators keep freed memory
until it is short, so a step takes all of the limit, whatever is alive. The thread that returns what is freed needs some
tens of milliseconds on a busy machine, in which a training may take 100 MiB."""
_MOST, _WHOLE, _LESS = 0.94, 1.0, 0.8
"""Shares of the limit to decide for. Heaps have holes, up to a third of what is alive. So the whole limit is used only
if less does not do, or if no memory had to be returned to the system. Where some had to be, to get it back may cost
more than to move a little more."""
_NUM_STEPS = 2
"""Of a trial, and of a turn: the second counts. In the first one, the store still learns its order, or memory is taken
from the system that what was tried before has not used."""
_CLEARLY = 1.5
"""What has taken that many times as long as the fastest is not tried again."""
_KEEP, _STORE, _CHECKPOINT = Action("keep"), Action("store"), Action("recompute")


class Chooser:
    """Decides by prices within a limit, and by trials of at most `num_steps` steps. `offset_bytes`: so far was a
    measured peak beyond the limit above the predicted one. `seconds`: that the solver has taken."""

    def __init__(self, prices: Prices, limit_bytes: int, num_steps: int = 0) -> None:
        self.prices, self.limit_bytes = prices, limit_bytes
        self.offset_bytes = 0
        self.seconds = 0.0
        self._num_steps = num_steps

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
        """The fastest of what is decided by prices, the simple strategies, and those that are `known`, if steps stay
        within the limit with it; None: no such decision was found. To keep all is fastest if no memory is returned
        meanwhile. Of the others, the best take turns at the end."""
        kept = self._tried_if_small(trials, _KEEP)
        if any(each.measured.returned_bytes == 0 for each in within(kept, self.limit_bytes)):
            return kept[0]
        tried = [*self._tried_by_prices(trials, known), *kept, *known]
        simple = [self.prices.uniform(action).actions for action in (_KEEP, _STORE, _CHECKPOINT)]
        if simple[-1] not in [each.decision.actions for each in tried]:
            tried += self._tried_if_small(trials, _CHECKPOINT)
        rivals, num_turns = rivals_of(within(tried, self.limit_bytes), simple, self._num_steps)
        in_turns = self._by_turns(trials, rivals, num_turns)
        return fastest(within(in_turns, self.limit_bytes) or within(tried, self.limit_bytes))

    def _tried_if_small(self, trials: Trials, action: Action) -> list[TriedDecision]:
        """A trial of a simple strategy, if it leaves a margin: else it may be killed."""
        decision = self.prices.uniform(action)
        most_bytes = self.limit_bytes - margin_of(_MARGINS[0], self.limit_bytes) - self.offset_bytes
        return [self._tried(trials, decision)] if decision.peak_bytes <= most_bytes else []

    def _tried_by_prices(self, trials: Trials, known: Sequence[TriedDecision]) -> list[TriedDecision]:
        """A second decision is tried if the first exceeds the limit, or leaves reason to use more or less of it."""
        found: list[TriedDecision] = []
        share = _MOST
        for _ in range(2):
            decision = self.decide(share)
            if decision is None and share < _WHOLE:
                decision = self.decide(share := _WHOLE)
            if decision is None or any(decision.does == choice.decision.does for choice in found):
                break
            same = [each for each in known if each.decision.does == decision.does]
            found.append(self._noted(same[0]) if same else self._tried(trials, decision))
            if within(found[-1:], self.limit_bytes):
                share = _LESS if found[-1].measured.returned_bytes else _WHOLE
        return found

    def _tried(self, trials: Trials, decision: Decision) -> TriedDecision:
        self._num_steps -= _NUM_STEPS
        return self._noted(TriedDecision(decision, trials.take(decision, _NUM_STEPS)))

    def _noted(self, tried: TriedDecision) -> TriedDecision:
        """A peak above the prediction, but within the limit, is no miss: allocators keep freed memory until it is
        short. Nor is one below it: the next decision may have another reason to be as large as predicted."""
        if tried.measured.peak_bytes > self.limit_bytes:
            self.offset_bytes = max(self.offset_bytes, tried.measured.peak_bytes - tried.decision.peak_bytes)
        return tried

    def _by_turns(self, trials: Trials, rivals: Sequence[TriedDecision], num_turns: int) -> list[TriedDecision]:
        turns = [[trials.take(rival.decision, _NUM_STEPS) for rival in rivals] for _ in range(num_turns)]
        return [together(rival, [turn[place] for turn in turns]) for place, rival in enumerate(rivals)]


def within(tried: Sequence[TriedDecision], limit_bytes: int) -> list[TriedDecision]:
    """Those whose steps have stayed within the limit."""
    return [each for each in tried if each.measured.peak_bytes <= limit_bytes]


def fastest(tried: Sequence[TriedDecision]) -> TriedDecision | None:
    """The first of the fastest ones; None: there are none."""
    return min(tried, key=lambda each: each.measured.seconds, default=None)


def together(rival: TriedDecision, turns: Sequence[MeasuredStep]) -> TriedDecision:
    """The time of its turns alone, if there were any: a trial shows a machine that may have been faster or slower. The
    highest peak of all."""
    if not turns:
        return rival
    seconds = statistics.median(turn.seconds for turn in turns)
    peak_bytes = max(step.peak_bytes for step in (rival.measured, *turns))
    returned_bytes = sum(turn.returned_bytes for turn in turns)
    return TriedDecision(rival.decision, MeasuredStep(seconds, peak_bytes, returned_bytes))


def rivals_of(
    fitting: Sequence[TriedDecision], simple: Collection[object], num_steps: int
) -> tuple[list[TriedDecision], int]:
    """Which of the decisions that fit take turns, and how many turns, in at most `num_steps` steps.

    The fastest one comes first, then the `simple` ones, by their actions, then others, as far as there are steps. None
    is more than half slower than the fastest. One alone takes no turns."""
    close: list[TriedDecision] = []
    for each in sorted(fitting, key=lambda each: each.measured.seconds):
        is_close = not close or each.measured.seconds <= _CLEARLY * close[0].measured.seconds
        if is_close and all(each.decision.actions != other.decision.actions for other in close):
            close.append(each)
    first = [each for each in close if each is close[0] or each.decision.actions in simple]
    rivals = [*first, *(each for each in close if each not in first)][: num_steps // _NUM_STEPS]
    return rivals, num_steps // (_NUM_STEPS * len(rivals)) if len(rivals) > 1 else 0

"""Decides by prices, tries the decision in real steps, and corrects the prices where they missed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from .decision import Decision, decide
from .menu import Action, Kind, Option
from .prices import Prices, Trials
from .steps import MeasuredStep

__all__ = ["Corrected", "TriedDecision", "choose"]

_MARGINS = (1 / 16, 1 / 50)
"""The share of a limit that a decision leaves free; the second only if nothing else fits. Allocators keep freed memory
until it is short, so a step takes all of the limit, whatever is alive. The thread that returns what is freed needs some
tens of milliseconds on a busy machine, in which a training may take 100 MiB."""
_LEAST_MARGIN_BYTES = 16 * 2**20
_MOST, _WHOLE, _LESS = 0.94, 1.0, (0.85, 0.7)


class _Trial(NamedTuple):
    """What to decide for: a share of the limit, and a kind of action to do without."""

    share: float
    without: Kind | None = None


_TRIALS = (
    _Trial(_MOST),
    _Trial(_MOST, without="recompute"),
    _Trial(_MOST, without="store"),
    _Trial(_MOST),
    _Trial(_WHOLE),
    _Trial(_WHOLE),
    *(_Trial(share) for share in _LESS),
)
"""The second of two alike is made with what those before it have taught.

Prices of storing and of recomputing come from different steps. Where one of them is too low, a mixture of both is
slower than predicted, and what does without that one may be faster.

Heaps have holes: under decisions for the whole limit, 0.06 to 0.07 of it were resident beside what was alive, and the
kernel has killed a plan. So the whole limit is used only if less does not do, or if no memory had to be returned to the
system. Where some had to be, to get it back may cost more than to move a little more, so less is tried. Heaps may hold
a third more than what is alive; within 0.7 there is room for that, and hardly anything is returned."""
_CLOSE, _MOST_RIVALS = 0.1, 3
"""Decisions whose trials differ by less than this share are compared by turns, so many at most. One without a kind of
action is not tried if it is predicted to be slower by more."""
_EQUAL = 0.02
"""Nor does a smaller difference by turns say anything."""
PEAK_MISS, TIME_MISS = 0.03, 0.05
"""Misses of a prediction by more than these shares are corrected."""


class TriedDecision(NamedTuple):
    """A decision that was tried.

    Attributes:
        decision: what is done.
        measured: the step and the peak in its trial.
        share: of the limit, for which it was made.
    """

    decision: Decision
    measured: MeasuredStep
    share: float = 1.0

    @property
    def is_short(self) -> bool:
        """Whether memory was short: some had to be returned to the system."""
        return self.measured.returned_bytes > 0

    @classmethod
    def untried(cls, decision: Decision) -> TriedDecision:
        """A decision that is believed."""
        return cls(decision, MeasuredStep(decision.step_seconds, decision.peak_bytes))


class Corrected:
    """Prices, and how far predictions by them have missed.

    Args:
        prices: as they were measured.
        limit_bytes: for the peak.

    Attributes:
        prices: with the corrections.
        offset_bytes: a measured peak beyond the limit was so much above the predicted one.
        decision_seconds: time that the solver has taken.
    """

    def __init__(self, prices: Prices, limit_bytes: int) -> None:
        self.prices = prices
        self.offset_bytes = 0
        self.decision_seconds = 0.0
        self._limit_bytes = limit_bytes
        self._share = 1.0

    def keep_within(self, share: float) -> None:
        """Decide for this share of the limit from now on."""
        self._share = share

    def decide(self, share: float | None = None, *, without: Kind | None = None) -> Decision | None:
        """The fastest decision within a share of the limit (`keep_within`); None: there is none.

        The store's staging window is narrowed only if nothing else fits into the whole limit.

        Args:
            without: "store": nothing is stored; "recompute": nothing is recomputed.
        """
        prices, began, decision = self.prices, time.perf_counter(), None
        options = prices.options if without is None else _options_without(without, prices.options)
        share = self._share if share is None else share
        ways = [(margin, False) for margin in _MARGINS]
        if share >= 1 and prices.costs.spared_bytes:
            ways.append((min(_MARGINS), True))
        for margin, is_narrow in ways:
            target_bytes = int(share * self._limit_bytes) - _margin(margin, self._limit_bytes) - self.offset_bytes
            decision = decision or decide(options, prices.moments, prices.costs, target_bytes, is_narrow=is_narrow)
        self.decision_seconds += time.perf_counter() - began
        return decision

    def least(self) -> Decision | None:
        """The decision with the least peak, with a narrow staging window."""
        prices = self.prices
        return decide(prices.options, prices.moments, prices.costs, None, is_narrow=True)

    def fitting(self, actions: Mapping[str, Action]) -> Decision | None:
        """The decision for an action of each block, if it is within the limit; narrow only if that has to be."""
        for is_narrow in (False, True):
            decision = self.prices.decision_for(actions, is_narrow=is_narrow)
            if decision is not None and self.needed_bytes(decision) <= self._limit_bytes:
                return decision
        return None

    def needed_bytes(self, decision: Decision) -> int:
        """The least limit for which a decision would be made."""
        peak_bytes, least_margin = decision.peak_bytes + self.offset_bytes, min(_MARGINS)
        return peak_bytes + _margin(least_margin, int(peak_bytes / (1 - least_margin)))

    def learn_peak(self, decision: Decision, measured: MeasuredStep) -> None:
        """Take in the measured peak alone.

        Within the limit, a peak above the prediction is no miss: allocators keep freed memory until it is short. Nor is
        one below it: the next decision may have another reason to be as large as predicted.
        """
        if measured.peak_bytes > self._limit_bytes:
            self.offset_bytes = max(self.offset_bytes, measured.peak_bytes - decision.peak_bytes)

    def learn(self, decision: Decision, measured: MeasuredStep) -> None:
        """Take in what a step under a decision was measured to need."""
        self.learn_peak(decision, measured)
        costs = self.prices.costs
        missed_seconds = measured.seconds - decision.step_seconds
        if all(option.action == Action("keep") for option in decision.chosen.values()):
            costs = replace(costs, step_seconds=measured.seconds)
        elif decision.stored_bytes:
            # Computing again was measured for each block; what the store costs depends on how much it has to move.
            per_byte = costs.store_seconds + missed_seconds / decision.stored_bytes
            costs = replace(costs, store_seconds=max((costs.store_seconds + per_byte) / 2, 0.0))
        else:
            added_seconds = sum(option.seconds for option in decision.chosen.values())
            if added_seconds > 0:
                factor = max(1 + missed_seconds / added_seconds, 0.25)
                self.prices = self.prices._replace(options=_scaled(self.prices.options, (1 + factor) / 2))
        self.prices = self.prices._replace(costs=costs)

    def learn_step(
        self, decision: Decision, measured: MeasuredStep, expected_seconds: float, waited_seconds: float
    ) -> None:
        """Take in what steps of a training needed, whose time was known from others like them.

        If the training waited for the store for half of what was too long, it is the store that has become slow.
        Otherwise the whole machine is slower, or faster, than it was.
        """
        if decision.stored_bytes and 0 < measured.seconds - expected_seconds <= 2 * waited_seconds:
            self.learn(decision, measured)
        else:
            self.learn_peak(decision, measured)
            self._slow_down(measured.seconds / expected_seconds)

    def _slow_down(self, factor: float) -> None:
        costs = self.prices.costs
        costs = replace(costs, step_seconds=costs.step_seconds * factor, store_seconds=costs.store_seconds * factor)
        self.prices = self.prices._replace(costs=costs, options=_scaled(self.prices.options, factor))


def choose(trials: Trials, corrected: Corrected, limit_bytes: int, known: list[TriedDecision]) -> TriedDecision | None:
    """The fastest choice that was measured to stay within the limit; None: none did.

    `corrected` keeps to the share of the limit for which it was made.

    Args:
        known: choices measured before.
    """
    tried = list(known)
    for choice in known:
        corrected.learn_peak(choice.decision, choice.measured)
    keep = corrected.prices.uniform(Action("keep"))
    if keep.peak_bytes + _margin(max(_MARGINS), limit_bytes) <= limit_bytes:  # else the kernel may kill the trial
        tried.append(TriedDecision(keep, trials.take(keep, corrected.prices)))
        corrected.learn(tried[-1].decision, tried[-1].measured)
        if tried[-1].measured.peak_bytes <= limit_bytes:
            return tried[-1]
    here: list[TriedDecision] = []
    prices = corrected.prices
    for trial in _TRIALS:
        if not _is_worth_a_trial(trial.share, here, limit_bytes):
            continue
        if trial.share in _LESS:
            corrected.prices = prices  # what returning memory takes is no price of a block
        decision = corrected.decide(trial.share, without=trial.without)
        if decision is None or any(decision.does_the_same(choice.decision) for choice in [*tried, *here]):
            continue
        if trial.without and _is_hopeless(decision, here):
            continue
        here.append(TriedDecision(decision, trials.take(decision, corrected.prices), trial.share))
        corrected.learn(decision, here[-1].measured)
    tried += here
    if here and here[-1].is_short:
        corrected.prices = prices
    best = _fastest(trials, corrected, tried, limit_bytes, outdated=known)
    if best is not None:
        corrected.keep_within(best.share)
    return best


def _is_worth_a_trial(share: float, before: Sequence[TriedDecision], limit_bytes: int) -> bool:
    """Whether to try a decision for that share after the trials `before`. See `_TRIALS`."""
    if not before or share == _MOST:
        return True
    if share == _WHOLE:
        return not before[-1].is_short or all(choice.measured.peak_bytes > limit_bytes for choice in before)
    return before[-1].is_short


def _is_hopeless(decision: Decision, before: Sequence[TriedDecision]) -> bool:
    fastest_seconds = min((choice.measured.seconds for choice in before), default=decision.step_seconds)
    return decision.step_seconds > (1 + _CLOSE) * fastest_seconds


def _fastest(
    trials: Trials,
    corrected: Corrected,
    tried: Sequence[TriedDecision],
    limit_bytes: int,
    outdated: Sequence[TriedDecision],
) -> TriedDecision | None:
    """The fastest that stays within the limit; None: none does.

    One trial follows the other, and a machine may be faster in one minute than in the next. So those whose trials tell
    little apart take steps by turns, and what they took of each turn decides. The trials of `outdated` ones tell
    nothing: they were before heaps had the holes that trials leave.
    """
    fitting = [choice for choice in tried if choice.measured.peak_bytes <= limit_bytes]
    left = sorted(fitting, key=lambda choice: (choice in outdated, choice.measured.seconds))
    while left:
        most_seconds = (1 + _CLOSE) * left[0].measured.seconds
        rivals = [choice for choice in left if choice.measured.seconds <= most_seconds][:_MOST_RIVALS]
        left = [choice for choice in left if choice not in rivals]
        if len(rivals) == 1 and rivals[0] not in outdated:
            return rivals[0]
        steps = trials.take_by_turns([choice.decision for choice in rivals], corrected.prices)
        rivals = [choice._replace(measured=_measured_in(own)) for choice, own in zip(rivals, steps, strict=True)]
        for place in _fastest_first(rivals, steps):
            if rivals[place].measured.peak_bytes <= limit_bytes:
                return rivals[place]
    return None


def _fastest_first(rivals: Sequence[TriedDecision], steps: Sequence[Sequence[MeasuredStep]]) -> list[int]:
    """The places of the rivals, by what the steps of each took of the turns. Of equal ones, memory is not short in the
    first."""
    turns = list(zip(*steps, strict=True))
    shares = [
        statistics.median(turn[place].seconds / sum(step.seconds for step in turn) for turn in turns)
        for place in range(len(rivals))
    ]
    most = (1 + _EQUAL) * min(shares)
    return sorted(range(len(rivals)), key=lambda place: (shares[place] > most, rivals[place].is_short, shares[place]))


def _measured_in(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    return MeasuredStep(
        statistics.median(step.seconds for step in steps),
        max(step.peak_bytes for step in steps),
        sum(step.returned_bytes for step in steps),
    )


def _options_without(kind: Kind, options: Mapping[str, list[Option]]) -> dict[str, list[Option]]:
    def is_left(action: Action) -> bool:
        return not action.uses_store if kind == "store" else action.kind != kind

    return {name: [option for option in several if is_left(option.action)] for name, several in options.items()}


def _scaled(options: Mapping[str, list[Option]], factor: float) -> dict[str, list[Option]]:
    return {
        name: [replace(option, seconds=option.seconds * factor) for option in several]
        for name, several in options.items()
    }


def _margin(share: float, limit_bytes: int) -> int:
    return max(_LEAST_MARGIN_BYTES, int(share * limit_bytes))

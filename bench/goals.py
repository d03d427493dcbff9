"""What a benchmark asks of its figures, and whether a run met it. Pure.

A goal about two variants is judged round by round: what the machine did to one in a round it mostly did to the other
too. The median over the rounds decides. A ratio to what is not above zero, such as a cost beyond a variant that
happened to be the slower one, counts as missed by far; where such a round is the median, nothing was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Figures = Mapping[str, float]
Rounds = Mapping[int, Mapping[str, Figures]]
"""Round, variant, figures."""

UNITS = {
    "_gb_per_second": "GB/s",
    "_cpu_seconds_per_gb": "CPU s/GB",
    "_microseconds": "µs",
    "_seconds": "s",
    "_bytes": "MiB",
}


class Unit(NamedTuple):
    """How a figure is told: its name in words without the unit, the unit ("": none), and what it is divided by."""

    words: str
    unit: str = ""
    scale: int = 1


def unit_of(figure: str) -> Unit:
    for suffix, unit in UNITS.items():
        if figure.endswith(suffix):
            return Unit(figure.removesuffix(suffix).replace("_", " "), unit, 2**20 if unit == "MiB" else 1)
    return Unit(figure.replace("_", " "))


@dataclass(frozen=True)
class Goal:
    """One figure of one variant, against a bound (exactly one of `at_most`, `at_least`, `equals`). With `of`: its ratio
    to the best of those variants' in the same round. With `beyond`: its difference from that variant's. With both: what
    it is beyond that variant, as a ratio to what the best of `of` is beyond it. `if_missed`: the reason, where it is
    known."""

    what: str
    figure: str
    variant: str
    at_most: float | None = None
    at_least: float | None = None
    equals: float | None = None
    of: Sequence[str] = ()
    beyond: str | None = None
    if_missed: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.of, str):
            raise ValueError(f"goal {self.what!r}: `of` is a sequence of variants")
        if sum(bound is not None for bound in (self.at_most, self.at_least, self.equals)) != 1:
            raise ValueError(f"goal {self.what!r} needs one of at_most, at_least and equals")

    @property
    def variants(self) -> tuple[str, ...]:
        return (self.variant, *self.of, *([self.beyond] if self.beyond else []))

    @property
    def unit(self) -> Unit:
        return Unit("") if self.of else unit_of(self.figure)

    @property
    def asked(self) -> str:
        bounds = {"≤": self.at_most, "≥": self.at_least, "=": self.equals}
        ((sign, bound),) = ((sign, bound) for sign, bound in bounds.items() if bound is not None)
        words = f"{sign} {bound / self.unit.scale:g} {self.unit.unit}".rstrip()
        if self.of:
            words += f" x {'the best of ' if len(self.of) > 1 else ''}{', '.join(self.of)}"
        return words + (f", beyond {self.beyond}" if self.beyond else "")

    def admits(self, value: float) -> bool:
        if self.at_most is not None:
            return value <= self.at_most
        if self.at_least is not None:
            return value >= self.at_least
        return value == self.equals

    def value_in(self, variants: Mapping[str, Figures]) -> float | None:
        """What one round says; None if a variant gave no such figure there. Infinite, on the wrong side of the bound,
        if that would be a ratio to something that is not above zero."""
        if any(self.figure not in variants.get(name, {}) for name in self.variants):
            return None
        level = variants[self.beyond][self.figure] if self.beyond else 0
        value = variants[self.variant][self.figure] - level
        if not self.of:
            return value
        best = max if self.at_least is not None else min
        other = best(variants[name][self.figure] - level for name in self.of)
        if other > 0:
            return value / other
        return -math.inf if self.at_least is not None else math.inf


class Verdict(NamedTuple):
    """A goal and what came of it: the median over the rounds, and the least and the most of those that have a ratio,
    as `num_hidden` rounds do not."""

    goal: Goal
    median: float | None
    least: float | None
    most: float | None
    outcome: Literal["met", "missed", "not measured"]
    num_hidden: int = 0

    @property
    def in_words(self) -> str:
        is_explained = self.outcome == "missed" and self.goal.if_missed
        return f"missed: {self.goal.if_missed}" if is_explained else self.outcome

    @property
    def measured(self) -> str:
        if self.median is None or self.least is None or self.most is None:
            return "hidden by noise" if self.num_hidden else "-"
        unit = self.goal.unit
        median, least, most = (_four_digits(value / unit.scale) for value in (self.median, self.least, self.most))
        words = f"{median} {unit.unit}".rstrip() + (f" ({least} to {most})" if least != most else "")
        return words + (f"; {self.num_hidden} of the rounds are hidden by noise" if self.num_hidden else "")


def _four_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def judge(goal: Goal, rounds: Rounds) -> Verdict:
    values = [value for variants in rounds.values() if (value := goal.value_in(variants)) is not None]
    seen = [value for value in values if math.isfinite(value)]
    num_hidden = len(values) - len(seen)
    if 2 * num_hidden >= len(values):
        return Verdict(goal, None, None, None, "not measured", num_hidden)
    median = statistics.median(values)
    return Verdict(goal, median, min(seen), max(seen), "met" if goal.admits(median) else "missed", num_hidden)

"""The outcome of tuning, and the configuration file made of it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from ..base.toml_file import toml_text
from ..plain_text import plain
from .settings import TrialSettings

AS_IT_IS = "as it is"
"""The name of the program's own settings; programs read it. People see `Candidate.label`."""
LEAST_ROUNDS = 3
"""With fewer rounds, being faster every time proves nothing."""
_LEAST_GAIN = 0.02
"""A smaller gain does not justify leaving settings that are known to work."""


@dataclass(frozen=True)
class Candidate:
    """Settings that were measured.

    Attributes:
        name: "as it is", "defaults", "found 1", ...
        first_seconds: of a step in the one trial before the rounds; None: there was none, or it failed.
        step_seconds: by round, up to a failure or the first round that was slower than the reference's.
        is_allowed: it keeps to the limit.
        failure: why it failed, or None.
    """

    name: str
    settings: TrialSettings
    first_seconds: float | None = None
    step_seconds: Sequence[float] = ()
    is_allowed: bool = True
    failure: str | None = None

    @property
    def label(self) -> str:
        return "your settings" if self.name == AS_IT_IS else self.name

    @property
    def median_seconds(self) -> float | None:
        return statistics.median(self.step_seconds) if self.step_seconds and self.failure is None else None

    def is_ahead_of(self, other: Candidate) -> bool:
        """In the last round of both."""
        return self.failure is None and self.step_seconds[-1] < other.step_seconds[-1]

    def ratios_to(self, other: Candidate) -> list[float]:
        """By round; empty if it failed, or had too few rounds to prove anything."""
        ratios = [mine / its for mine, its in zip(self.step_seconds, other.step_seconds, strict=False)]
        return ratios if self.failure is None and len(ratios) >= LEAST_ROUNDS else []

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return {**fields.pop("settings"), **fields, "median_seconds": self.median_seconds}


@dataclass(frozen=True)
class Tuned:
    """The outcome.

    Attributes:
        place, of_scope: the store's directory, and arguments of the scope, as the program has them: never varied.
        candidates: what was measured by turns; the first one that `is_allowed` is the reference.
        chosen, reason: the one of them to use, and why, in a sentence.
        tried: all other settings, each with the one trial in which it was tried.
    """

    place: str
    of_scope: Mapping[str, Any]
    candidates: Sequence[Candidate]
    chosen: Candidate
    tried: Sequence[Candidate]
    reason: str

    @property
    def config(self) -> Mapping[str, Mapping[str, Any]]:
        """The chosen settings, for `TierStore.from_config` and `tiered_offload.from_config`."""
        store = {"path": self.place, **self.chosen.settings.store}
        return {"store": store, "offload": {**self.of_scope, **self.chosen.settings.offload}}

    @property
    def toml(self) -> str:
        """The same as a file, which begins with why. Values of None are defaults and left out."""
        title = ["Found by tierstore tune for the program and the machine that it was run on.", self.reason]
        # TOML has no None. For inline_bytes None is not the default, so it cannot be left out.
        tables = {
            name: {key: value for key, value in table.items() if value is not None}
            for name, table in self.config.items()
        }
        if self.chosen.settings.inline_bytes is None:
            title.append("The program has inline_bytes=None, which TOML cannot express: pass it as an argument.")
        lines = [line for each in title for line in wrap(plain(each), 78, break_long_words=False)]
        return "".join(f"# {line}\n" for line in lines) + toml_text(tables)

    def as_dict(self) -> dict[str, Any]:
        return {
            "chosen": self.chosen.name,
            "reason": self.reason,
            "config": self.config,
            "candidates": [each.as_dict() for each in self.candidates],
            "tried": [each.as_dict() for each in self.tried],
        }


def choose(candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    """The best that was measured, and why. The first candidate that keeps to the limit is the reference. Another takes
    its place only if it was faster in every round, and by more than half of the reference's own spread."""
    reference, *others = [each for each in candidates if each.is_allowed]
    seconds, middle = reference.step_seconds, reference.median_seconds
    spread = (max(seconds) - min(seconds)) / middle if middle else 0.0
    noise = max(_LEAST_GAIN, spread / 2)
    better = [
        (statistics.median(ratios), each)
        for each in others
        if (ratios := each.ratios_to(reference)) and max(ratios) < 1
    ]
    told = "the defaults" if reference.name == "defaults" else reference.label
    if better:
        gained, best = min(better, key=lambda pair: pair[0])
        if gained < 1 - noise:
            found = "the defaults" if best.name == "defaults" else repr(best.name)
            words = f"With {found} a step takes {gained:.2f} of the time that it takes with {told}"
            return best, f"{words}, and was faster in every round."
    if not others:
        return reference, f"Keep {told}: there was nothing else to measure."
    why = f"no candidate was faster in every round by more than {noise:.0%}. Smaller differences may be chance."
    return reference, f"Keep {told}: {why}"

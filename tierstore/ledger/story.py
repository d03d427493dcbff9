"""The story of a record: how it came into its state. Kept only where the books are validated."""

from __future__ import annotations

import sys
from collections import deque
from typing import NamedTuple

from .record import RuledRecord
from .state import State

_RULES = __name__.rpartition(".")[0] + "."
_NUM_KEPT = 12


class Move(NamedTuple):
    """One move of a record. `by`: the function of the rules that made it; `event`: what had called the rules."""

    before: State
    after: State
    by: str
    event: str

    def __str__(self) -> str:
        return f"{self.before.name} → {self.after.name} by {self.by}, in {self.event}"


class Storied(RuledRecord):
    """A record that keeps its latest moves, as a base before its own class, which has a slot `story`."""

    __slots__ = ()

    story: deque[Move]

    def move(self, to: State) -> None:
        before = self.state
        super().move(to)
        frame = mover = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_RULES):
            frame = frame.f_back
        self.story.append(Move(before, to, mover.f_code.co_qualname, frame.f_code.co_qualname))


def new_story() -> deque[Move]:
    """Of a record that was not moved yet."""
    return deque(maxlen=_NUM_KEPT)


def story_of(record: RuledRecord) -> str:
    """For people."""
    if not isinstance(record, Storied):
        return "its story was not kept"
    return "\n  ".join(("its story:", *map(str, record.story)))

"""What a plan may do with a block, and what each way costs. Pure numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .recording import Operator, RecordedCall

Kind = Literal["keep", "store", "recompute"]

_LEAST_SHARE = 0.02
"""Outputs of operators that take less than this of the block's time are not worth holding."""
_MOST_PREFIXES = 6
_CALL_SECONDS = 40e-6
"""What selective checkpointing adds for each operator, in forward and backward together: it is called in Python."""


class HeldOutput(NamedTuple):
    """An operator whose output backward gets back instead of computing it: its number in the block, and its name."""

    number: int
    name: str


class Action(NamedTuple):
    """What is done with a block.

    "keep": its saved tensors stay where they are; "store": they go to the store; "recompute": backward computes them
    again, but gets the outputs of `held` back. `stores`: inputs and held outputs go to the store.
    """

    kind: Kind
    held: tuple[HeldOutput, ...] = ()
    stores: bool = False

    @property
    def uses_store(self) -> bool:
        return self.kind == "store" or self.stores

    def __str__(self) -> str:
        if self.kind != "recompute":
            return self.kind
        what = f"recompute, hold {len(self.held)}" if self.held else "recompute"
        return f"{what}, stored" if self.stores else what


@dataclass(frozen=True)
class Option:
    """An action; the storages that stay in memory and those that go to the store, with sizes; and the seconds added to
    the step beside what the store takes."""

    action: Action
    kept: Mapping[int, int]
    stored: Mapping[int, int]
    seconds: float


def options_of(calls: Sequence[RecordedCall], recompute_seconds: float, min_bytes: int) -> list[Option]:
    """What may be done with a block that is called as `calls` tell, once or more in a step.

    `recompute_seconds`: measured, to compute all its calls again. `min_bytes`: smaller storages stay where they are.
    """
    saved = _union(call.saved for call in calls)
    inputs = _union(call.inputs for call in calls)
    options = [Option(Action("keep"), saved, {}, 0.0), _stored(Action("store"), saved, 0.0, min_bytes)]
    if any(call.differs for call in calls) or not calls:
        return options
    for held in (), *_prefixes(calls[0]):
        if held and any(call.kind != calls[0].kind for call in calls):
            break
        needed, seconds = dict(inputs), recompute_seconds
        recorded_seconds = sum(call.seconds for call in calls)
        for call in calls:
            for output in held:
                operator = call.operators[output.number]
                needed |= operator.outputs
                seconds -= operator.seconds * recompute_seconds / max(recorded_seconds, 1e-9)
            if held:
                seconds += _CALL_SECONDS * len(call.operators)
        options.append(Option(Action("recompute", held), needed, {}, seconds))
        options.append(_stored(Action("recompute", held, stores=True), needed, seconds, min_bytes))
    return [option for option in options if not _is_worse(option, options)]


def _union(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for part in parts:
        found |= part
    return found


def _stored(action: Action, needed: Mapping[int, int], seconds: float, min_bytes: int) -> Option:
    small = {name: nbytes for name, nbytes in needed.items() if nbytes < min_bytes}
    return Option(action, small, {name: nbytes for name, nbytes in needed.items() if name not in small}, seconds)


def _prefixes(call: RecordedCall) -> list[tuple[HeldOutput, ...]]:
    """Sets of operators to hold: those that take most time for their bytes first, one more in each set."""
    worth = [
        (operator.seconds / max(sum(operator.outputs.values()), 1), index)
        for index, operator in enumerate(call.operators)
        if operator.can_be_held and operator.seconds >= _LEAST_SHARE * call.seconds
    ]
    ranked = [index for _, index in sorted(worth, reverse=True)]
    step = max(-(-len(ranked) // _MOST_PREFIXES), 1)
    lengths = range(len(ranked), 0, -step)
    return [_held(call.operators, sorted(ranked[:length])) for length in reversed(lengths)]


def _held(operators: Sequence[Operator], indices: Iterable[int]) -> tuple[HeldOutput, ...]:
    return tuple(HeldOutput(index, operators[index].name) for index in indices)


def _is_worse(option: Option, options: Sequence[Option]) -> bool:
    """Whether another option needs no more of anything, and less of something. Only what is kept is compared so."""
    kept_bytes, stored_bytes = sum(option.kept.values()), sum(option.stored.values())
    return any(
        other.kept.items() <= option.kept.items()
        and other.stored.items() <= option.stored.items()
        and other.seconds <= option.seconds
        and (sum(other.kept.values()), sum(other.stored.values()), other.seconds)
        != (kept_bytes, stored_bytes, option.seconds)
        for other in options
    )

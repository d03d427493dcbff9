"""What a plan may do with a block, and what each way costs. Pure numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .recording import RecordedCall

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


class BlockTraits(NamedTuple):
    """Names of buffers that forward changes, and of modules that were in evaluation mode."""

    buffers: Sequence[str] = ()
    evaluates: Sequence[str] = ()


@dataclass(frozen=True)
class Option:
    """An action; the storages that stay in memory and those that go to the store, with sizes; and the seconds added to
    the step beside what the store takes."""

    action: Action
    kept: Mapping[int, int]
    stored: Mapping[int, int]
    seconds: float


def options_of(
    calls: Sequence[RecordedCall], recompute_seconds: float, min_bytes: int, kept_anyway: Collection[int] = ()
) -> list[Option]:
    """What may be done with a block that is called as `calls` tell, once or more in a step. To compute it again takes
    `recompute_seconds`. Storages of less than `min_bytes` stay where they are; those `kept_anyway` cost nothing."""

    def kept(kind: Kind, needed: Mapping[int, int], seconds: float, held: tuple[HeldOutput, ...] = ()) -> Option:
        charged = {name: nbytes for name, nbytes in needed.items() if name not in kept_anyway}
        return Option(Action(kind, held), charged, {}, seconds)

    def stored(option: Option, action: Action) -> Option:
        small = {name: nbytes for name, nbytes in option.kept.items() if nbytes < min_bytes}
        large = {name: nbytes for name, nbytes in option.kept.items() if name not in small}
        return Option(action, small, large, option.seconds)

    options = [kept("keep", _union(call.saved for call in calls), 0.0)]
    options.append(stored(options[0], Action("store")))
    if any(call.differs for call in calls) or not calls:
        return options
    recorded_seconds = max(sum(call.seconds for call in calls), 1e-9)
    for held in (), *_prefixes(calls[0]):
        if held and any(call.kind != calls[0].kind for call in calls):
            break
        needed, seconds = _union(call.inputs for call in calls), recompute_seconds
        for call in calls:
            for output in held:
                operator = call.operators[output.number]
                needed |= operator.outputs
                seconds -= operator.seconds * recompute_seconds / recorded_seconds
            if held:
                seconds += _CALL_SECONDS * len(call.operators)
        options.append(kept("recompute", needed, seconds, held))
        options.append(stored(options[-1], Action("recompute", held, stores=True)))
    return [option for option in options if not _is_worse(option, options)]


def _union(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for part in parts:
        found |= part
    return found


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
    return [
        tuple(HeldOutput(index, call.operators[index].name) for index in sorted(ranked[:length]))
        for length in reversed(lengths)
    ]


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

"""Which modules are the blocks of a plan. Pure: it is told a tree of calls."""

from __future__ import annotations

from .call_tree import CallNode

__all__ = ["blocks_of"]

_MOST_SHARE = 1 / 8
"""A call that saves more of all bytes than this is taken apart, where that is possible."""
_COVERED = 0.8
"""The share of a call's saved bytes that the calls inside it must have saved, if it is to be taken apart."""


def blocks_of(root: CallNode) -> list[str]:
    """The names of the modules that a plan decides on, in the order of their first calls.

    A call is taken apart if it saves more than an eighth of everything and the modules inside it save most of that.
    Leaves are worth a decision only if the model itself consists of them. A module with one member that saves all is
    taken apart only if the member is. What no block saves stays where it is.
    """
    whole_bytes = sum(root.all_saved().values())
    names: dict[str, None] = {}
    for call in root.calls:
        names |= dict.fromkeys(part.name for part in _parts(call, whole_bytes, is_model=True))
    return [name for name in names if not any(_is_inside(name, other) for other in names)]


def _parts(call: CallNode, whole_bytes: int, *, is_model: bool) -> list[CallNode]:
    saved = call.all_saved()
    if not saved:
        return []
    inside = [inner for inner in call.calls if is_model or not inner.is_leaf]
    if sum(saved.values()) <= _MOST_SHARE * whole_bytes or _covered(inside, saved) < _COVERED:
        return [call]
    parts = [part for inner in call.calls for part in _parts(inner, whole_bytes, is_model=False)]
    return [call] if len(parts) == 1 and parts[0] in call.calls else parts


def _is_inside(name: str, other: str) -> bool:
    """Whether a module is a member of another one; both may be blocks if one was called by different callers."""
    return name != other and (not other or name.startswith(f"{other}."))


def _covered(calls: list[CallNode], saved: dict[int, int]) -> float:
    inside: dict[int, int] = {}
    for call in calls:
        inside |= call.all_saved()
    return sum(inside.values()) / max(sum(saved.values()), 1)

"""What the ranks of a training tell each other while they plan blocks that exchange data between them.

If one rank computes such a block again and another does not, the first waits for what nobody sends. So all of them
measure the same steps, and take one decision: the fastest that fits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import ConfigError
from .decision import Decision
from .menu import Action
from .recording import RecordedCall

if TYPE_CHECKING:
    from .choice import Chooser

_EVERYWHERE = (Action("keep"), Action("store"), Action("recompute", stores=True), Action("recompute"))
"""Proposed beside what each rank has decided: other ways depend on times, so not all ranks may have them."""


def are_several() -> bool:
    """Whether `torch.distributed` is in use: this process may be one rank of several."""
    return dist.is_available() and dist.is_initialized()


def _gathered(told: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, told)
    return found


def share_differences(calls: Sequence[RecordedCall]) -> None:
    """Have `differs` of each call say what it says in another rank, if it says nothing here: the next steps compute
    blocks again, and all ranks have to do so with the same ones. Each of them has to call; waits for all. Raises
    ConfigError: in all ranks: they have other blocks."""
    of_ranks = _gathered([(call.name, call.differs) for call in calls])
    names = [[name for name, _ in told] for told in of_ranks]
    if any(others != names[0] for others in names):
        raise ConfigError(
            "model", "another one in each rank", "its blocks communicate: plan the same model in all ranks"
        )
    for call, *told in zip(calls, *of_ranks, strict=True):
        reasons = [differs for _, differs in told if differs]
        if reasons and not call.differs:
            call.differs = f"in another rank, {reasons[0]}"


def agreed(chooser: Chooser, own: Decision | None) -> Decision | None:
    """The decision that all ranks take, by this rank's prices. Each of them has to call; waits for all.

    `own`: this rank's decision; None: nothing fits here. Returns None, in all ranks, if nothing fits everywhere.
    """
    decisions = [own, *map(chooser.prices.uniform, _EVERYWHERE)]
    proposals = _gathered([decision.actions for decision in decisions if decision is not None])
    candidates = [chooser.fitting(actions) for of_rank in proposals for actions in of_rank]
    seconds_of_ranks = _gathered([math.inf if one is None else one.step_seconds for one in candidates])
    slowest = [max(seconds) for seconds in zip(*seconds_of_ranks, strict=True)]
    best = min(range(len(slowest)), key=slowest.__getitem__)
    return None if math.isinf(slowest[best]) else candidates[best]

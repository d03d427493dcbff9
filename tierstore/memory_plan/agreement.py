"""One decision for all ranks, where blocks exchange data between them.

If one rank computes such a block again and another does not, the first waits for what nobody sends. So all of them
measure the same steps, and take one decision: the fastest that fits everywhere. They do not correct it later.
"""

from __future__ import annotations

import math

from .choice import Corrected
from .decision import Decision
from .menu import Action
from .ranks import gathered

__all__ = ["agreed"]

_EVERYWHERE = (Action("keep"), Action("store"), Action("recompute", stores=True), Action("recompute"))
"""Proposed beside what each rank has decided: other ways depend on times, so not all ranks may have them."""


def agreed(corrected: Corrected, own: Decision | None) -> Decision | None:
    """The decision that all ranks take. Each of them has to call; waits for all.

    Args:
        corrected: this rank's prices.
        own: this rank's decision; None: nothing fits here.

    Returns:
        The decision, by this rank's prices. None, in all ranks: nothing fits everywhere.
    """
    decisions = [own, *map(corrected.prices.uniform, _EVERYWHERE)]
    proposals = gathered([decision.actions for decision in decisions if decision is not None])
    candidates = [corrected.fitting(actions) for of_rank in proposals for actions in of_rank]
    seconds_of_ranks = gathered([math.inf if one is None else one.step_seconds for one in candidates])
    slowest = [max(seconds) for seconds in zip(*seconds_of_ranks, strict=True)]
    best = min(range(len(slowest)), key=slowest.__getitem__)
    return None if math.isinf(slowest[best]) else candidates[best]

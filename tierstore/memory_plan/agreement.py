"""One decision for all ranks, where blocks exchange data between them.

If one rank computes such a block again and another does not, the first waits for what nobody sends. So all of them take
one decision: the fastest that fits everywhere. They do not correct it later.
"""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError
from .choice import Corrected
from .decision import Decision
from .menu import Action

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

    Raises:
        ConfigError: in all ranks: they have other blocks.
    """
    prices = corrected.prices
    blocks = _gathered(list(prices.options))
    if any(names != blocks[0] for names in blocks):
        raise ConfigError(
            "model", "another one in each rank", "its blocks communicate: plan the same model in all ranks"
        )
    decisions = [own, *map(prices.uniform, _EVERYWHERE)]
    proposals = _gathered([decision.actions for decision in decisions if decision is not None])
    candidates = [corrected.fitting(actions) for of_rank in proposals for actions in of_rank]
    seconds_of_ranks = _gathered([math.inf if one is None else one.step_seconds for one in candidates])
    slowest = [max(seconds) for seconds in zip(*seconds_of_ranks, strict=True)]
    best = min(range(len(slowest)), key=slowest.__getitem__)
    return None if math.isinf(slowest[best]) else candidates[best]


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found

"""What the ranks of a training tell each other while they plan blocks that exchange data between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError
from .recording import RecordedCall

__all__ = ["are_several", "gathered", "share_differences"]


def are_several() -> bool:
    """Whether `torch.distributed` is in use: this process may be one rank of several."""
    return dist.is_available() and dist.is_initialized()


def gathered(told: Any) -> list[Any]:
    """What each rank tells. Each of them has to call; waits for all."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, told)
    return found


def share_differences(calls: Sequence[RecordedCall]) -> None:
    """Have `differs` of each call say what it says in another rank, if it says nothing here.

    The next steps compute blocks again, and all ranks have to do so with the same ones. Each of them has to call; waits
    for all.

    Raises:
        ConfigError: in all ranks: they have other blocks.
    """
    of_ranks = gathered([(call.name, call.differs) for call in calls])
    names = [[name for name, _ in told] for told in of_ranks]
    if any(others != names[0] for others in names):
        raise ConfigError(
            "model", "another one in each rank", "its blocks communicate: plan the same model in all ranks"
        )
    for call, *told in zip(calls, *of_ranks, strict=True):
        reasons = [differs for _, differs in told if differs]
        if reasons and not call.differs:
            call.differs = f"in another rank, {reasons[0]}"

"""What a conductor and its trainers say to each other, a line of JSON each."""

import msgspec

from tests.soak.census import Census
from tests.soak.plan import TrainerPlan

__all__ = ["Order", "Said"]


class Order(msgspec.Struct, frozen=True):
    """A round's work.

    Attributes:
        plan: of it.
        places: a directory, or two, or a daemon's socket.
    """

    plan: TrainerPlan
    places: list[str]


class Said(msgspec.Struct, frozen=True):
    """What a trainer tells.

    Attributes:
        kind: "ready", "opened" (its store), "episode" (one has ended), or "round" (it is over).
        census: what the process holds, with all stores closed; None in the middle of a round.
        counts: what was done in the round.
        failures: what went wrong, in words.
    """

    kind: str
    census: Census | None = None
    counts: dict[str, int] = {}
    failures: list[str] = []

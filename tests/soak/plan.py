"""What happens in a round: pure, from the soak's seed and the round's number, so that any round can be run again.

And what a conductor and its trainers say to each other.
"""

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.soak.census import Census

__all__ = ["DISTURBANCES", "Order", "RoundPlan", "Said", "TrainerPlan", "plan_of"]

MIB = 2**20

DISTURBANCES = (
    "nothing",
    "daemon killed",
    "small drive",
    "trainer killed",
    "daemon restarted",
    "daemon away",
    "quota",
    "small drive under the daemon",
)
"""In turn. Killed and away: SIGKILL; restarted: SIGTERM. Away: it comes back after its clients have given up."""

_ALLOWED = {
    "small drive": ("StoreFullError",),
    "small drive under the daemon": ("StoreFullError",),
    "quota": ("QuotaExceededError",),
    "daemon away": ("DaemonUnavailableError",),
}
_CODECS = ("none", "auto", "zstd:1", "shuffle-zstd:1", "zstd:-3")
_HOST_BYTES = (0, 0, 100_000, MIB, 4 * MIB, 64 * MIB)


class TrainerPlan(NamedTuple):
    """What one process does in a round.

    Attributes:
        home: "embedded", or the daemon: "steady" lives as long as the soak, "shaky" for a round.
        options: of its store, beside where it is.
        num_episodes: of each of its threads, which share the store.
        allowed: names of the errors that the round brings about; any other is a failure.
    """

    seed: int
    home: str
    options: dict[str, Any]
    num_threads: int
    num_episodes: int
    allowed: tuple[str, ...]


class RoundPlan(NamedTuple):
    """A round.

    Attributes:
        disturbance: one of `DISTURBANCES`.
        after_episodes: the disturbance comes when so many episodes have ended, of all trainers together.
        daemon_codec: of the shaky daemon.
        trainers: the first is the one that lives as long as the soak; the last is the one that may be killed.
        num_drives: that embedded stores and the shaky daemon use.
    """

    disturbance: str
    after_episodes: int
    daemon_codec: str
    trainers: list[TrainerPlan]
    num_drives: int


class Order(NamedTuple):
    """A round's work. `places`: a directory, or two, or a daemon's socket."""

    plan: TrainerPlan
    places: list[str]


@dataclass(frozen=True)
class Said:
    """What a trainer tells.

    Attributes:
        kind: "ready", "opened" (its store), "episode" (one has ended), or "round" (it is over).
        census: what the process holds, with all stores closed; None in the middle of a round.
        counts: what was done in the round.
        failures: what went wrong, in words.
    """

    kind: str
    census: Census | None = None
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def plan_of(seed: int, number: int, num_episodes: int, num_trainers: int) -> RoundPlan:
    """The round of that number, from 0 on: every process does about so many episodes."""
    chance = random.Random(f"{seed} {number}")
    disturbance = DISTURBANCES[number % len(DISTURBANCES)]
    trainers = [_trainer(chance, disturbance, num_episodes) for _ in range(num_trainers)]
    after = chance.randint(2, max(3, num_episodes * num_trainers // 2))
    num_drives = 1 if disturbance.startswith("small drive") else chance.choice((1, 2))
    return RoundPlan(disturbance, after, chance.choice(_CODECS), trainers, num_drives)


def _trainer(chance: random.Random, disturbance: str, num_episodes: int) -> TrainerPlan:
    home = chance.choice(["embedded", "steady", "shaky"])
    if disturbance.startswith("daemon") or disturbance in ("quota", "small drive under the daemon"):
        home = "shaky"
    elif disturbance == "small drive":
        home = "embedded"
    num_threads = chance.randint(1, 3)
    options: dict[str, Any] = {"host_bytes": chance.choice(_HOST_BYTES)}
    options["staging_bytes"] = chance.choice([80 * 1024, MIB, 4 * MIB, 16 * MIB])
    if home == "embedded":
        options["codec"] = chance.choice(_CODECS)
        options["inline_bytes"] = chance.choice([0, 4096, 128 * 1024, None])
        options["disk_bytes"] = 1024 * MIB
    else:
        options["window_bytes"] = chance.choice([MIB, 8 * MIB])
        options["reconnect_seconds"] = 0.2 if disturbance == "daemon away" else 60.0
    return TrainerPlan(
        chance.getrandbits(60),
        home,
        options,
        num_threads,
        max(1, num_episodes // num_threads),
        _ALLOWED.get(disturbance, ()),
    )

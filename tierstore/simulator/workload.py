"""A training step as the store sees it: its calls, and how long it computes between them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Saved(NamedTuple):
    """A tensor that forward saves.

    Attributes:
        nbytes: size of its storage.
        node: number of the autograd node that saves it; later nodes have higher numbers.
        record: the index of the first saved tensor of the same storage; None: this is the first.
        kind: kind of its content, for the codec.
        is_shared: others hold its storage as long as the graph lives, so it never leaves memory.
    """

    nbytes: int
    node: int
    record: int | None = None
    kind: str = ""
    is_shared: bool = False


class Compute(NamedTuple):
    """Training computes for `seconds` without calling the store."""

    seconds: float


class Pack(NamedTuple):
    """Saved tensor number `saved` is saved."""

    saved: int


class LetGo(NamedTuple):
    """The last other owner of the storage of saved tensor number `saved` releases it. Others held it until now."""

    saved: int


class EndScope(NamedTuple):
    """The scope is left: all kernels of forward have run."""


class Unpack(NamedTuple):
    """Backward asks for saved tensor number `saved`."""

    saved: int


class Release(NamedTuple):
    """The graph releases saved tensor number `saved`. The last release of a storage frees its bytes."""

    saved: int


Action = Compute | Pack | LetGo | EndScope | Unpack | Release


@dataclass(frozen=True)
class Workload:
    """One step of one rank: the actions of its training thread, in order. Each tensor is packed once, in the order of
    the indices, and asked for and released only after that. `training_cores`: that compute keeps busy."""

    saved: Sequence[Saved]
    actions: Sequence[Action]
    training_cores: float = 1.0

    @property
    def saved_bytes(self) -> int:
        return sum(saved.nbytes for saved in self.saved if saved.record is None)

    @property
    def compute_seconds(self) -> float:
        return sum(action.seconds for action in self.actions if isinstance(action, Compute))

"""A training step as the store sees it: its calls, and how long it computes between them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ConfigError

_MOST_BYTES = 2**50
"""The most bytes of one storage. A damaged trace may have larger figures, which would overflow any budget."""


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
    on_device: bool = False


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
    """One step of one rank: the actions of its training thread, in order. `training_cores`: that compute keeps busy,
    unless an accelerator computes. Raises ConfigError: the actions are not those of a step: each tensor is packed once,
    in the order of the indices, and asked for and released only after that. Or the size, storage or place of a saved
    tensor is impossible."""

    saved: Sequence[Saved]
    actions: Sequence[Action]
    training_cores: float = 1.0

    def __post_init__(self) -> None:
        num_packed = 0
        released: set[int] = set()
        for number, action in enumerate(self.actions):
            if isinstance(action, Pack):
                if action.saved != num_packed:
                    raise ConfigError("actions", action, f"action {number} should pack number {num_packed}")
                num_packed += 1
            elif isinstance(action, LetGo | Unpack | Release):
                if not 0 <= action.saved < num_packed or action.saved in released:
                    raise ConfigError("actions", action, f"action {number} is about what is not saved then")
                if isinstance(action, Release):
                    released.add(action.saved)
        if num_packed != len(self.saved):
            raise ConfigError("actions", num_packed, f"pack all {len(self.saved)} that are saved")
        for index, saved in enumerate(self.saved):
            if not 0 <= saved.nbytes <= _MOST_BYTES:
                raise ConfigError("saved", saved, f"number {index} has 0 to {_MOST_BYTES} bytes")
            if saved.record is not None and not 0 <= saved.record < index:
                raise ConfigError("saved", saved, f"the record of number {index} is an earlier one")
            if saved.record is not None and saved.on_device != self.saved[saved.record].on_device:
                raise ConfigError("saved", saved, f"number {index} is where its storage is")

    @property
    def uses_device(self) -> bool:
        """Whether any tensor is saved on an accelerator. The whole step is then computed there."""
        return any(saved.on_device for saved in self.saved)

    @property
    def compute_seconds(self) -> float:
        return sum(action.seconds for action in self.actions if isinstance(action, Compute))

"""A training step as the store sees it: its calls. And the options of the store that takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Saved(NamedTuple):
    """A tensor that forward saves.

    Attributes:
        nbytes: size of its storage.
        node: number of the autograd node that saves it; later nodes have higher numbers.
        record: the index of the first saved tensor of the same storage; None: this is the first.
        is_shared: others hold its storage as long as the graph lives, so it never leaves memory.
    """

    nbytes: int
    node: int
    record: int | None = None
    is_shared: bool = False


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


Action = Pack | LetGo | EndScope | Unpack | Release


class Workload(NamedTuple):
    """One step: the actions of its training thread, in order. Each tensor is packed once, in the order of the indices,
    and asked for and released only after that."""

    saved: Sequence[Saved]
    actions: Sequence[Action]


class Settings(NamedTuple):
    """Options of the store and of the scope. `disk_bytes`: None: no limit. `staging_grows`: behave as a store whose
    `staging_bytes` is None."""

    host_bytes: int
    staging_bytes: int
    disk_bytes: int | None = None
    prefetch: str = "learned"
    lookahead_bytes: int | None = None
    staging_grows: bool = False

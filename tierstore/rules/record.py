"""What the rules see of a record. The store's records are `handle.Record`, the simulator's `SimulatedRecord`."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from .plan import Place
from .state import State
from .windows import Window

__all__ = ["R", "RuledRecord"]


class RuledRecord(Protocol):
    """The part of a record that decides something. `handle.Record` describes each attribute, except these:

    Attributes:
        is_alive: somebody can still ask for the bytes.
        has_device_bytes: its bytes are on its accelerator: still, or again.
        span_bytes: the number of bytes that are stored.
    """

    key: int
    state: State
    nbytes: int
    worth: int
    place: Place | None
    window: Window | None
    charged_bytes: int
    shared: bool
    forced: bool
    demanded: int
    wanted: bool
    urgent: bool
    fetched: bool
    stored_bytes: int
    cause: BaseException | None

    @property
    def device(self) -> object:
        """The accelerator that it lives on; None: host memory."""

    @property
    def slot(self) -> object:
        """The host memory that holds restored or copied bytes, or will; None: there is none."""

    @property
    def held(self) -> object:
        """The memory that a running job works on; None: no job is running."""

    @property
    def ready(self) -> Any:
        """The point of a copy stream up to which the slot is being copied to or from; None: it is not."""

    @property
    def is_alive(self) -> bool:
        """See above."""

    @property
    def has_device_bytes(self) -> bool:
        """See above."""

    @property
    def span_bytes(self) -> int:
        """See above."""

    def move(self, to: State) -> None:
        """Change the state. An illegal move raises RuntimeError."""


R = TypeVar("R", bound=RuledRecord)

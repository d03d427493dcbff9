"""What the rules see of a record. The store's records are `handle.Record`, the simulator's `SimulatedRecord`."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from .plan import Place
from .state import State
from .windows import Window


class RuledRecord(Protocol):
    """The part of a record that decides something. `handle.Record` describes each attribute."""

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
    num_members: int

    @property
    def device(self) -> object: ...

    @property
    def slot(self) -> object: ...

    @property
    def held(self) -> object: ...

    @property
    def ready(self) -> Any: ...

    @property
    def is_alive(self) -> bool: ...

    def keep_alive(self) -> object | None:
        """What keeps the record alive for as long as the caller has it; None: it has died.

        Garbage collection may run, and let go of a graph, at any moment.
        """

    @property
    def has_device_bytes(self) -> bool: ...

    @property
    def span_bytes(self) -> int: ...

    def move(self, to: State) -> None: ...


R = TypeVar("R", bound=RuledRecord)

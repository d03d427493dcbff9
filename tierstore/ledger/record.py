"""What the rules know of a record. The store's records are `Record` (`residency/handle.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ..base.remains import Remains
from .state import MOVES, State

if TYPE_CHECKING:
    from .plan import PlannedTier
    from .windows import Window


class RuledRecord(Remains[Any]):
    """The part of a record that decides something. Changed only under the store's lock.

    Calling it returns the handle, or None once that is gone; the record is then in the store's queue to be released.

    Attributes:
        key: unique in this store, growing in the order of packing.
        state: see the table in `state.py`; assigned by `move` alone.
        shared: somebody else held the storage when the record was last looked at.
        forced: the record is stored even if others hold its storage.
        nbytes: size of the storage; once the bytes were offloaded or dropped from memory, those that are stored.
        slot: the memory that holds the bytes, or will.
        device: the accelerator that the tensor lives on; None: host memory.
        ready: the point of a copy stream up to which the slot is being copied to or from.
        held: the memory that a running job works on, which this keeps alive; None: no job is running.
        priority: the record with the lowest priority leaves first. It is the key, unless the order of use is known.
        planned: where the record waits for backward; None: not known.
        demanded: how many threads wait for the bytes.
        wanted: backward will ask for the record soon, so it stays in memory once it is written.
        urgent: the queued read was submitted as demanded.
        fetched: the record was restored, and not asked for since.
        claims: of its storage, by all who hold an alias of that for a store; None: it holds none any more, as when
            others manage the memory.
        num_members: how many saved tensors are in it, if it is a group (see NOTE [Groups]), else 1.
        cause: why the bytes could not be read.
    """

    __slots__ = (
        "__weakref__", "cause", "charged_bytes", "claims", "demanded", "device", "fetched", "forced", "held", "key",
        "nbytes", "num_members", "planned", "priority", "ready", "shared", "slot", "state", "stored_bytes", "urgent",
        "wanted", "window",
    )  # fmt: skip

    def __init__(self, key: int, nbytes: int) -> None:
        self.key = self.priority = key
        self.state = State.PENDING
        self.shared = self.forced = self.wanted = self.urgent = self.fetched = False
        self.nbytes = nbytes
        self.window: Window | None = None
        self.charged_bytes = self.stored_bytes = self.demanded = 0
        self.slot: Any = None
        self.device: Any = None
        self.ready: Any = None
        self.held: Any = None
        self.claims: Any = None
        self.planned: PlannedTier | None = None
        self.num_members = 1
        self.cause: BaseException | None = None

    @property
    def is_alive(self) -> bool:
        return self() is not None

    @property
    def has_device_bytes(self) -> bool:
        """Whether its bytes are on its device."""
        raise NotImplementedError

    @property
    def span_bytes(self) -> int:
        """How many bytes are stored."""
        raise NotImplementedError

    def move(self, to: State) -> None:
        """Any move that is not in `MOVES` raises RuntimeError: a bug of tierstore."""
        if to not in MOVES[self.state]:
            raise RuntimeError(f"handle {self.key}: illegal move {self.state.name} → {to.name}")
        self.state = to


R = TypeVar("R", bound=RuledRecord)

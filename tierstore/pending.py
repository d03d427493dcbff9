"""Records whose bytes are where autograd left them: settled, and not known to be ours alone.

NOTE [No sooner than needed]
Who owns a storage, and where its bytes are charged, only matters once something has to leave. As long as the budget has
room for everything that is here, records are neither looked at nor charged, which is most of what a pack would cost.
Only at the end of a scope it is noted which of them somebody else holds, for the statistics.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from .handle import State
from .plan import Place

__all__ = ["NUM_EXAMINED_PER_PACK", "Pending", "Settled"]

NUM_EXAMINED_PER_PACK = 4
"""Of the records whose storage somebody else still holds, so many are looked at again at each pack: more than one, so
that the list cannot grow, few, so that a pack stays cheap."""


class Settled(Protocol):
    """What may be pending: a `Record`, or a simulated one. Attributes as `Record`'s."""

    key: int
    state: State
    nbytes: int
    place: Place | None
    shared: bool

    @property
    def device(self) -> object:
        """The accelerator; None: host memory."""


R = TypeVar("R", bound=Settled)


class Pending(Generic[R]):
    """The records in PENDING that were settled. Guarded by the store's lock.

    Args:
        is_sole_owner: whether nobody else holds a record's storage now.

    Attributes:
        num_bytes: of all of them.
        must_be_examined: one of them is to leave as soon as it is ours: an accelerator, or, by the plan, memory.
    """

    def __init__(self, is_sole_owner: Callable[[R], bool]) -> None:
        self._is_sole_owner = is_sole_owner
        self._fresh: dict[int, R] = {}  # not looked at yet
        self._unsurveyed: list[R] = []  # those of them that were settled since the last survey
        self._shared: OrderedDict[int, R] = OrderedDict()  # somebody else held their storage when last seen
        self.num_bytes = 0
        self.must_be_examined = False

    def settle(self, records: Iterable[R]) -> None:
        """The records' bytes may be read from now on."""
        for record in records:
            if record.state is State.PENDING:
                self._fresh[record.key] = record
                self._unsurveyed.append(record)
                self.num_bytes += record.nbytes
                self.must_be_examined |= record.device is not None or record.place is Place.DISK

    def share(self, record: R) -> None:
        """Somebody else holds the record's storage."""
        record.shared = True
        self._shared[record.key] = record
        self.must_be_examined |= record.place is Place.DISK
        self.num_bytes += record.nbytes

    def survey(self) -> None:
        """Note which of the records that were settled since the last time somebody else holds too."""
        surveyed, self._unsurveyed = self._unsurveyed, []
        for record in surveyed:
            if record.key in self._fresh and not self._is_sole_owner(record):
                self.forget(record)
                self.share(record)

    def take(self, how_many: int | None) -> Iterator[R]:
        """Take out what was not looked at yet, and some (None: all) of what others held, the longest ago first."""
        self._unsurveyed.clear()
        self.must_be_examined = False
        fresh, self._fresh = self._fresh, {}
        how_many = len(self._shared) if how_many is None else min(how_many, len(self._shared))
        for record in fresh.values():
            self.num_bytes -= record.nbytes
            yield record
        for _ in range(how_many):
            _, record = self._shared.popitem(last=False)
            self.num_bytes -= record.nbytes
            yield record

    def forget(self, record: R) -> None:
        """The record is not here any more, if it was."""
        if self._fresh.pop(record.key, None) is not None or self._shared.pop(record.key, None) is not None:
            self.num_bytes -= record.nbytes

    def clear(self) -> None:
        """Forget all."""
        self._fresh.clear()
        self._unsurveyed.clear()
        self._shared.clear()
        self.num_bytes = 0

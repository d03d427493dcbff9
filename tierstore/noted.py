"""Saved tensors that a store knows of, but keeps no books of yet.

NOTE [Noted, then booked]
As long as the budget has room for everything that was saved, all there is to do is to guard it: most graphs of most
programs come and go like that. So what is packed is only *noted*: the packed object keeps an alias of the tensor, its
version, and where its storage lay, and a count of bytes goes up. There is no record and no handle, and
what backward gets is what was kept. That is a third of what a record costs.

A noted tensor is *booked*, that is, gets its record, when the count says that room may be short, when somebody else is
seen to hold its storage too once the scope has ended, or when somebody asks for exact figures. Those of one log are
booked in the order of packing, and views of one storage find each other then, as if they had been booked at once. A
tensor that dies before was nobody's concern; its bytes are counted until its log dies too, or until they are looked
for.

The packed object gives its alias up only after the record has one of its own. Whoever took the alias just before, to
give it to autograd, counts as one more owner of the storage for as long as it is used.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch

from .handle import Handle, Record
from .host import HostBooks
from .layout import Layout
from .remains import Remains
from .torch_names import storage_use_count

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["HandleMaker", "LogRemains", "NotedLog", "NotedTensor", "NotedTensors"]

_FIRST_LOOK_PACKS = 1024
"""A log is not looked through for what has died before it is as long as this."""


class HandleMaker(Protocol):
    """The store, as a log of it needs it."""

    def handle_for(self, noted: NotedTensor) -> Handle:
        """Make the handle, and with it the record, of a tensor that was only noted so far."""


class NotedTensor:
    """A tensor that was handed to a store, and what it takes to book it later.

    Attributes:
        alias: a detached alias of the tensor; None once it is booked, or the store is closed.
        version: the version counter at packing.
        root: the tensor, or its base, for as long as that lives.
        address: where the storage lay at packing.
        storage_id: of the storage, for as long as the alias is there.
        key: of its record.
        log, index: where it is noted, and its number there.
        joined: it is counted as a view of what another one is of.
        handle, layout: once it is booked.
    """

    __slots__ = (
        "__weakref__", "address", "alias", "handle", "index", "joined", "key", "layout", "log", "root", "storage_id",
        "version",
    )  # fmt: skip

    layout: Layout
    index: int

    def __init__(
        self,
        alias: torch.Tensor | None,
        version: int,
        root: weakref.ref[torch.Tensor],
        address: int,
        storage_id: int,
        key: int,
        log: NotedLog,
    ) -> None:
        self.alias = alias
        self.version = version
        self.root = root
        self.address = address
        self.storage_id = storage_id
        self.key = key
        self.log = log
        self.joined = False
        self.handle: Handle | None = None

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a tierstore saved tensor belongs to its graph and cannot be pickled")

    def become(self, handle: Handle, layout: Layout) -> None:
        """The tensor is booked: from now on its bytes are the handle's."""
        self.layout = layout
        self.handle = handle
        self.alias = None  # last: see the module's docstring


class NotedLog:
    """What one thread packed between one backward and the next, in that order, in however many scopes.

    The tensors refer to the log, so it goes when the graph goes. It keeps nobody's bytes. Changed only under the
    store's lock.

    Args:
        maker: makes the handles of what is booked; kept alive, and with it the store open.
        books: the store's; its records are told from those of other stores by it.
        begin: notes that the log begins, and gives what is left of it at its end (`NotedTensors.begin`).

    Attributes:
        maker, books: as above.
        number: unique in this process.
        nodes: which autograd node saved each tensor.
        newest_node: which saved last; its kernel may still have to run.
        is_settled: that has run too.
        sizes: bytes of each tensor's storage.
        records: of each; None while it is only noted.
        noted: what is only noted, dead tensors included, by index.
        remains: what the store has to do when it is gone.
        first_key: of the record of the first.
        num_surveyed: of so many it is known who else holds them.
        plan: where they belong, if the packs so far are those of a graph that is known.
    """

    _numbers = itertools.count()

    def __init__(self, maker: HandleMaker, books: object, begin: Callable[[NotedLog], LogRemains]) -> None:
        self.number = next(self._numbers)
        self.maker = maker
        self.books = books
        self.nodes: list[int] = []
        self.sizes: list[int] = []
        self.records: list[Record | None] = []
        self.noted: dict[int, weakref.ref[NotedTensor]] = {}
        self.remains = begin(self)
        self.newest_node = -1
        self.is_settled = False
        self.num_surveyed = 0
        self.plan: Plan | None = None
        self._look_at = _FIRST_LOOK_PACKS
        self.first_key = 0

    def append_booked(self, record: Record, node: int) -> int:
        """A tensor that has a record already; returns its index."""
        index = len(self.nodes)
        if not index:
            self.first_key = record.key
        self.newest_node = node
        self.is_settled = False
        self.nodes.append(node)
        self.sizes.append(record.nbytes)
        self.records.append(record)
        return index

    def come_in(self, index: int, record: Record) -> None:
        """Tensor `index`, until now only noted, has a record."""
        self.records[index] = record

    def place(self, record: Record, index: int) -> None:
        """Tell a record where it belongs."""
        if self.plan is not None:
            self.plan.place(record, index, self.first_key)

    def forget(self, index: int) -> int:
        """Tensor `index` is not just noted any more; returns its bytes."""
        del self.noted[index]
        return self.sizes[index]

    def is_mostly_dead(self) -> bool:
        """Whether most of it is gone. Looked at seldom: each time that twice as much has been packed."""
        if len(self.nodes) < self._look_at:
            return False
        self._look_at = 2 * len(self.nodes)
        num_noted = sum(1 for reference in list(self.noted.values()) if reference() is not None)
        num_booked = sum(1 for record in list(self.records) if record is not None and record.source is not None)
        return 2 * (num_noted + num_booked) < len(self.nodes)

    def settled(self) -> Iterator[tuple[int, NotedTensor | None]]:
        """What is noted and may be read, by index; None for what has died. May be taken out meanwhile."""
        for index, reference in list(self.noted.items()):
            if self.is_settled or self.nodes[index] != self.newest_node:
                yield index, reference()

    def unsurveyed(self) -> Iterator[NotedTensor]:
        """What of it has come since the last survey, and is settled and alive."""
        for index in range(self.num_surveyed, len(self.nodes)):
            if not self.is_settled and self.nodes[index] == self.newest_node:
                return
            self.num_surveyed = index + 1
            noted = self.noted[index]() if index in self.noted else None
            if noted is not None:
                yield noted


class LogRemains(Remains[NotedLog]):
    """What is to be done when a log is gone.

    Attributes:
        number, noted, sizes: the log's.
        then: called too, under the store's lock.
    """

    __slots__ = ("noted", "number", "sizes", "then")

    def __init__(self, log: NotedLog, note_death: Callable[[LogRemains], None]) -> None:
        self.number = log.number
        self.noted = log.noted
        self.sizes = log.sizes
        self.then: Callable[[], None] | None = None


class NotedTensors:
    """All that a store has only noted. Guarded by the store's lock.

    Args:
        books: of host memory; some of it may be charged there.

    Attributes:
        num_bytes: of it, as far as is known; never too few.
        ended: what is left of logs that have died, see NOTE [No finalizers] in `remains.py`.
    """

    def __init__(self, books: HostBooks) -> None:
        self._books = books
        self.num_bytes = 0
        self.ended: deque[LogRemains] = deque()
        self._begun: set[LogRemains] = set()  # keeps those of every log
        self._logs: dict[int, LogRemains] = {}  # in which something is noted

    def begin(self, log: NotedLog) -> LogRemains:
        """A log begins. Any thread, without the lock."""
        remains = LogRemains(log, self.ended.append)
        self._begun.add(remains)
        return remains

    def add(self, noted: NotedTensor, node: int, nbytes: int) -> None:
        """Note a tensor, saved by the autograd node of that number. On the way of every pack."""
        log = noted.log
        if not log.noted:
            self.drop_ended()
            self._logs[log.number] = log.remains
        nodes = log.nodes
        noted.index = index = len(nodes)
        if not index:
            log.first_key = noted.key
        log.is_settled = False
        nodes.append(node)
        log.sizes.append(nbytes)
        log.noted[index] = weakref.ref(noted)
        log.records.append(None)
        self.num_bytes += nbytes

    def drop_ended(self) -> None:
        """What dead logs had noted is not counted any more, and what is to be done after them is done."""
        while self.ended:
            remains = self.ended.popleft()
            self._begun.discard(remains)
            self._logs.pop(remains.number, None)
            self.num_bytes -= sum(remains.sizes[index] for index in remains.noted)
            self._books.keep_noted(self.num_bytes)
            if remains.then is not None:
                remains.then()

    def take(self) -> Iterator[NotedTensor]:
        """Take out everything that is settled, to be booked."""
        for reference in list(self._logs.values()):
            log = reference()
            if log is not None:
                yield from self._take_from(log)

    def _take_from(self, log: NotedLog) -> Iterator[NotedTensor]:
        for index, noted in log.settled():
            self._forget(log, index)
            if noted is not None:
                yield noted

    @staticmethod
    def by_storage(log: NotedLog) -> Iterator[tuple[list[NotedTensor], bool]]:
        """What is new in a log, in groups of one storage each, and whether nobody else holds that."""
        groups: dict[int, list[NotedTensor]] = {}
        for noted in log.unsurveyed():
            groups.setdefault(noted.storage_id, []).append(noted)
        for storage_id, group in groups.items():
            # Besides the aliases, the storage's own Python object is counted (torch 2.11 and 2.13).
            yield group, storage_use_count(storage_id) == len(group) + 1

    def remove(self, noted: NotedTensor) -> None:
        """Take out one."""
        self._forget(noted.log, noted.index)

    def _forget(self, log: NotedLog, index: int) -> None:
        self.num_bytes -= log.forget(index)
        if self._books.noted_bytes:
            self._books.keep_noted(self.num_bytes)
        if not log.noted:
            del self._logs[log.number]

    def living(self) -> Iterator[NotedTensor]:
        """All that is noted and alive."""
        for reference in list(self._logs.values()):
            log = reference()
            if log is not None:
                for tensor in list(log.noted.values()):
                    noted = tensor()
                    if noted is not None:
                        yield noted

    def give_up(self) -> None:
        """The store is closed: keep nobody's bytes."""
        for noted in self.living():
            noted.alias = None

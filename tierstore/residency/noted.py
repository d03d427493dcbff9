"""Saved tensors that have no record yet: the store only counts their bytes.

NOTE [Noted, then booked]
In most programs, most graphs are freed while the budget still has room for everything that they saved. Such tensors
only have to be guarded against changes. So a pack only *notes* a tensor: the packed object keeps an alias of it, its
version and the address of its storage, and the store adds its bytes to a count. There is no record and no handle;
backward gets the alias. This costs a third of what a record costs.

A noted tensor is *booked*, that is, it gets a record, when the count says that room may be short, when its scope has
ended and somebody else also holds its storage, or when somebody asks for its handle or for exact figures. The tensors
of one log are booked in the order of packing. Views of one storage then share a record, as if each had been booked when
it was packed. The store ignores a tensor that dies before it is booked. Its bytes stay in the count until its log dies,
or until `NotedTensors.take` finds it dead. On an accelerator a tensor is *tracked* in the same way: see `tracked.py`.

The packed object drops its alias only after the record has an alias of its own. A thread that read the alias just
before, to give it to autograd, counts as one more owner of the storage while it uses it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..base.remains import Remains
from ..ledger.windows import HostWindows, Window
from .handle import Handle, Member, Record
from .layout import Layout, layout_of
from .torch_names import storage_use_count
from .tracked import TrackedBytes, TrackedReference

if TYPE_CHECKING:
    from ..ledger.plan import Plan

_FIRST_LOOK_PACKS = 1024
"""A log is not searched for dead tensors before it has this many packs."""


class NotedTensor:
    """A saved tensor, with everything that is needed to book it later.

    Attributes:
        alias: a detached alias of the tensor; None once it is booked, or the store is closed.
        root: weak reference to the tensor, or to its base.
        address: where the storage lay at packing.
        storage_id: identifies the storage while the alias exists.
        key: the key that its record will have.
        itself: the saved tensor, for as long as it lives, if backward is to get that very object.
        joined: it was counted as a view of a storage that another tensor has brought in.
        device: the accelerator that the tensor lives on; None: host memory. `stream`: its stream that packed it.
        handle, layout: set when it is booked; until then `handle` is None. Where the log keeps layouts, that is set
            before.
    """

    __slots__ = (
        "__weakref__", "address", "alias", "device", "handle", "index", "itself", "joined", "key", "layout", "log",
        "root", "storage_id", "stream", "version",
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
        itself: weakref.ref[torch.Tensor] | None = None,
    ) -> None:
        self.alias = alias
        self.version = version
        self.root = root
        self.address = address
        self.storage_id = storage_id
        self.key = key
        self.log = log
        self.itself = itself
        self.joined = False
        self.device: torch.device | None = None
        self.stream: Any = None
        self.handle: Handle | None = None

    def unpack(self) -> torch.Tensor:
        raise NotImplementedError

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a tierstore saved tensor belongs to its graph and cannot be pickled")

    def become(self, handle: Handle, layout: Layout) -> None:
        self.layout = layout
        self.handle = handle
        self.alias = None  # last: see the module's docstring


class NotedLog:
    """The packs of one thread between one backward and the next, in order, across all its scopes.

    The packed tensors refer to the log, so it dies with the graph. It keeps no bytes alive. It changes only under the
    store's lock.

    Attributes:
        store: the handles of its booked tensors, and this reference, keep it open.
        residency: the store's, by which its records are told from those of other stores.
        number: unique in this process.
        num_packs: how many tensors were packed. `packs`: the autograd node that saved each, and its storage's bytes.
        newest_node: the node that saved last; its kernel may still have to run.
        is_settled: the kernel of the newest node has run too.
        noted_storages: id and size of the storage of each tensor in `noted`, by index. `num_noted`: how many tensors of
            each such storage there are.
        records: the record of each tensor; None while it is only noted.
        noted: the tensors in host memory that are only noted, dead ones included, by index.
        tracked: likewise, those on accelerators. `storages`: what is charged for them: see `TrackedBytes`.
        tracks: tensors on accelerators may still be tracked.
        leaving: those of them that wait for enough others to leave in a group, with the bytes of each.
        remains: outlives the log; from it the store learns that the log has died.
        first_key: key of the first tensor's record.
        num_surveyed: how many tensors, from the first on, were checked for other owners of their storage.
        plan: where the records belong; None: no known graph begins with these packs.
        members: those tensors that are in groups, by index.
        gathers: small tensors may become groups: NOTE [Groups] in `groups.py`. `num_sorted`: how many packs there were
            when tensors were last sorted into groups.
        keeps_layouts: tensors have a layout as soon as they are noted. The same for all logs: see `living.py`.
    """

    keeps_layouts: ClassVar[bool] = False
    _numbers = itertools.count()

    def __init__(self, store: object, residency: object, begin: Callable[[NotedLog], LogRemains]) -> None:
        self.number = next(self._numbers)
        self.store = store
        self.residency = residency
        self.num_packs = 0
        self.packs: list[tuple[int, int]] = []
        self.noted_storages: dict[int, tuple[int, int]] = {}
        self.num_noted: dict[tuple[int, int], int] = {}
        self.records: list[Record | None] = []
        self.noted: dict[int, weakref.ref[NotedTensor]] = {}
        self.tracked: dict[int, TrackedReference[NotedTensor]] = {}
        self.storages: dict[int, list[int]] = {}
        self.tracks = False
        self.leaving: dict[int, int] = {}
        self.leaving_bytes = 0
        self.remains = begin(self)
        self.newest_node = -1
        self.is_settled = False
        self.num_surveyed = 0
        self.members: dict[int, Member] = {}
        self.gathers = True
        self.num_sorted = 0
        self.plan: Plan | None = None
        self._look_at = _FIRST_LOOK_PACKS
        self.first_key = 0

    def append_booked(self, record: Record, node: int) -> int:
        index = self.num_packs
        if not index:
            self.first_key = record.key
        self.newest_node = node
        self.is_settled = False
        self.packs.append((node, record.nbytes))
        self.records.append(record)
        self.num_packs = index + 1
        return index

    def come_in(self, indices: Sequence[int], record: Record) -> None:
        """The record of those tensors, which had none until now."""
        for index in indices:
            self.records[index] = record

    def let_leave(self, index: int) -> None:
        """Tracked tensor `index` is to leave with others."""
        _, self.leaving[index] = self.packs[index]
        self.leaving_bytes += self.leaving[index]

    def place_group(self, record: Record, tensors: Iterable[NotedTensor]) -> None:
        """A group is worth as much as the member that is needed first."""
        if self.plan is not None:
            self.plan.place_group(record, [noted.index for noted in tensors], self.first_key)

    def place(self, record: Record, index: int) -> None:
        if self.plan is not None:
            self.plan.place(record, index, self.first_key)

    def enter(self, noted: NotedTensor) -> int:
        """Returns the bytes that are noted now and were not before: those of a storage that is new."""
        index = noted.index
        self.noted[index] = weakref.ref(noted)
        self.noted_storages[index] = storage = noted.storage_id, self.packs[index][1]
        num_before = self.num_noted.get(storage, 0)
        self.num_noted[storage] = num_before + 1
        return 0 if num_before else storage[1]

    def forget(self, indices: Iterable[int]) -> int:
        """Returns the bytes that are noted no longer."""
        noted, num_noted, storages = self.noted, self.num_noted, self.noted_storages
        forgotten_bytes = 0
        for index in indices:
            del noted[index]
            storage = storages.pop(index)
            num_noted[storage] -= 1
            if not num_noted[storage]:
                del num_noted[storage]
                forgotten_bytes += storage[1]
        return forgotten_bytes

    def give(self, index: int, layout: Layout) -> torch.Tensor:
        """Saved tensor `index`, for a traced graph: noted or not, in that geometry, which has no lazy bits."""
        raise NotImplementedError

    def find(self, index: int) -> NotedTensor | None:
        """The saved tensor of that index, if it lives and has no record."""
        reference = self.noted.get(index) or self.tracked.get(index)
        return None if reference is None else reference()

    def unbooked(self) -> list[weakref.ref[NotedTensor]]:
        return [*list(self.noted.values()), *list(self.tracked.values())]

    def lay_out(self) -> None:
        for reference in self.unbooked():
            noted = reference()
            alias = None if noted is None else noted.alias
            if noted is not None and alias is not None:
                noted.layout = layout_of(alias)

    def is_mostly_dead(self) -> bool:
        """Whether most of its tensors are dead. Checked only each time the number of packs has doubled, else False."""
        if self.num_packs < self._look_at:
            return False
        self._look_at = 2 * self.num_packs
        num_noted = sum(1 for reference in self.unbooked() if reference() is not None)
        num_booked = sum(1 for record in list(self.records) if record is not None and record.source is not None)
        return 2 * (num_noted + num_booked) < self.num_packs

    def settled(self, among: Mapping[int, weakref.ref[NotedTensor]]) -> list[tuple[int, NotedTensor | None]]:
        """(index, tensor) of those `among` these that may be read; None: it has died."""
        packs, unsettled = self.packs, None if self.is_settled else self.newest_node
        return [(index, reference()) for index, reference in sorted(among.items()) if packs[index][0] != unsettled]

    def unsurveyed(self) -> Iterator[NotedTensor]:
        for index in range(self.num_surveyed, self.num_packs):
            if not self.is_settled and self.packs[index][0] == self.newest_node:
                return
            self.num_surveyed = index + 1
            reference = self.noted.get(index) or self.tracked.get(index)
            noted = None if reference is None else reference()
            if noted is not None:
                yield noted


class LogRemains(Remains[NotedLog]):
    """The data of a log that the store needs after the log has died.

    `then`: called when the store accounts for the log's death, under the store's lock.
    """

    __slots__ = ("noted", "num_noted", "number", "storages", "then", "tracked")

    def __init__(self, log: NotedLog, note_death: Callable[[LogRemains], None]) -> None:
        self.number = log.number
        self.noted = log.noted
        self.tracked = log.tracked
        self.storages = log.storages
        self.num_noted = log.num_noted
        self.then: Callable[[], None] | None = None

    def call_at_end(self, then: Callable[[], None]) -> None:
        self.then = then


class NotedTensors:
    """All tensors that a store has only noted or tracked. Guarded by the store's lock.

    Attributes:
        num_bytes: noted bytes, an upper bound: dead tensors that were not found yet are included.
        tracked: bytes of tracked tensors.
        ended: remains of logs that have died, see NOTE [No finalizers] in `remains.py`.
    """

    def __init__(self, windows: HostWindows, resident: Window) -> None:
        self._windows = windows
        self.num_bytes = 0
        self.tracked = TrackedBytes(resident)
        self.ended: deque[LogRemains] = deque()
        self._begun: set[LogRemains] = set()  # keeps the remains of every log alive
        self._logs: dict[int, LogRemains] = {}  # logs with noted or tracked tensors, by number

    def begin(self, log: NotedLog) -> LogRemains:
        remains = LogRemains(log, self.ended.append)
        self._begun.add(remains)
        return remains

    def add(self, noted: NotedTensor, node: int, nbytes: int) -> int:
        """Note or track a tensor that autograd node `node` saved. Every pack calls it.

        Returns by how many bytes more is noted in host memory: 0 for one more view of a noted storage.
        """
        log = noted.log
        if not (log.noted or log.tracked):
            self.drop_ended()
            self._logs[log.number] = log.remains
        noted.index = index = log.num_packs
        if not index:
            log.first_key = noted.key
        log.is_settled = False
        log.packs.append((node, nbytes))
        log.records.append(None)
        log.num_packs = index + 1
        if noted.device is not None:
            self.tracked.add(noted, log, index, noted.storage_id, nbytes)
            return 0
        log.noted[index] = weakref.ref(noted)
        log.noted_storages[index] = storage = noted.storage_id, nbytes  # as `NotedLog.enter`, without its call
        num_noted = log.num_noted
        if storage in num_noted:
            num_noted[storage] += 1
            return 0
        num_noted[storage] = 1
        self.num_bytes += nbytes
        return nbytes

    def drop_ended(self) -> None:
        """Stop counting the bytes of dead logs, and of tracked tensors that are dead; call the `then` of dead logs."""
        while self.ended:
            remains = self.ended.popleft()
            self._begun.discard(remains)
            self._logs.pop(remains.number, None)
            self.num_bytes -= sum([nbytes for _, nbytes in remains.num_noted])
            if remains.storages:
                self.tracked.end(remains)
            self._windows.keep_noted(self.num_bytes)
            if remains.then is not None:
                remains.then()
        if self.tracked.dead:
            for log in self.tracked.drop_dead(self._logs):
                self._strike_out(log)

    def take(self) -> list[NotedTensor]:
        """Remove and return every settled tensor in host memory that is alive; dead ones are removed too."""
        taken = []
        for log in self._living_logs():
            settled = log.settled(log.noted)
            self._forget(log, [index for index, _ in settled])
            taken += [noted for _, noted in settled if noted is not None]
        return taken

    def put_back(self, tensors: Iterable[NotedTensor]) -> None:
        """They were taken, and stay noted."""
        for noted in tensors:
            log, index = noted.log, noted.index
            self._logs[log.number] = log.remains
            if noted.device is None:
                self.num_bytes += log.enter(noted)
            else:
                self.tracked.add(noted, log, index, noted.storage_id, log.packs[index][1])
                log.let_leave(index)

    def end_round(self) -> None:
        """What is noted now was put back, or is not settled."""
        for log in self._living_logs():
            log.num_sorted = log.num_packs

    def take_tracked(self, of: NotedLog | None = None) -> list[NotedTensor]:
        """The same for those on accelerators, of one log or of all, those saved first first."""
        taken = []
        for log in self._living_logs() if of is None else (of,):
            taken += self._take_tracked(log, log.tracked)
            log.leaving, log.leaving_bytes = {}, 0
            if not log.tracks:
                for index in log.tracked:
                    log.let_leave(index)
        return sorted(taken, key=attrgetter("key"))

    def take_leaving(self, log: NotedLog) -> list[NotedTensor]:
        """The same for those on accelerators that wait to leave. What is not settled waits on."""
        leaving = log.leaving
        log.leaving, log.leaving_bytes = {}, 0
        waiting = {index: log.tracked[index] for index in leaving if index in log.tracked}
        taken = self._take_tracked(log, waiting)
        for index in waiting:
            if index in log.tracked:
                log.let_leave(index)
        return taken

    def _take_tracked(self, log: NotedLog, among: Mapping[int, TrackedReference[NotedTensor]]) -> list[NotedTensor]:
        taken = []
        for index, tracked in log.settled(among):
            self._untrack(log, index)
            if tracked is not None:
                taken.append(tracked)
        return taken

    def _living_logs(self) -> list[NotedLog]:
        return [log for reference in list(self._logs.values()) if (log := reference()) is not None]

    @staticmethod
    def by_storage(log: NotedLog) -> Iterator[tuple[list[NotedTensor], bool]]:
        """Yield (tensors, is_sole) for each storage that is new in a log; `is_sole`: nobody else holds it."""
        groups: dict[int, list[NotedTensor]] = {}
        for noted in log.unsurveyed():
            groups.setdefault(noted.storage_id, []).append(noted)
        for storage_id, group in groups.items():
            # Besides the aliases, the storage's own Python object is counted (torch 2.11 and 2.13).
            yield group, storage_use_count(storage_id) == len(group) + 1

    def remove(self, noted: NotedTensor) -> None:
        if noted.device is None:
            self._forget(noted.log, (noted.index,))
        else:
            self._untrack(noted.log, noted.index)

    def _forget(self, log: NotedLog, indices: Iterable[int]) -> None:
        self.num_bytes -= log.forget(indices)
        if self._windows.noted_bytes:
            self._windows.keep_noted(self.num_bytes)
        self._strike_out(log.remains)

    def _untrack(self, log: NotedLog, index: int) -> None:
        self.tracked.remove(log, index)
        self._strike_out(log.remains)

    def _strike_out(self, log: LogRemains) -> None:
        if not (log.noted or log.tracked):
            self._logs.pop(log.number, None)

    def living(self) -> Iterator[NotedTensor]:
        for log in self._living_logs():
            for reference in log.unbooked():
                noted = reference()
                if noted is not None:
                    yield noted

    def give_up(self) -> None:
        for remains in self._logs.values():
            self.tracked.end(remains)
        for noted in self.living():
            if noted.alias is not None:
                noted.layout = layout_of(noted.alias)  # a trace may still look at it
            noted.alias = None

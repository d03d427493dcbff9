"""The log of a graph: its saved tensors in the order of packing, and what backward does with that order.

The log of a graph is a `PackLog` (`hooks/order.py`)."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from ..base.remains import Remains
from .grants import Grant
from .graph_order import GraphOrder, Packs
from .on_device import DeviceReference
from .record import R
from .state import State

if TYPE_CHECKING:
    from .lookahead import Lookahead
    from .plan import Plan

_FIRST_LOOK_PACKS = 1024
"""A log is not searched for dead tensors before it has this many packs."""
_KEY_SHIFT = 48
"""A member's storage gets the number `key << _KEY_SHIFT | first_byte`, which is larger than any record's key."""


class LoggedTensor(Protocol):
    """A saved tensor, as a log sees it. `TrackedTensor` (`residency/tracked.py`) describes each attribute."""

    index: int
    key: int
    storage_id: int
    log: Any
    alias: Any

    @property
    def device(self) -> object: ...

    @property
    def stream(self) -> Any: ...


T = TypeVar("T", bound=LoggedTensor)


class Backward(Protocol):
    """Who is told that backward of a log has begun."""

    def begin_backward(self, log: Any) -> None: ...

    def look_ahead(self, lookahead: Lookahead[Any]) -> None: ...


class GraphLog(Generic[T, R]):
    """The packs of one thread between one backward and the next, in order, across all its scopes.

    The packed tensors refer to the log, so it dies with the graph. It keeps no bytes alive. Forward and backward
    change it on their thread; what other threads read as well changes only under the store's lock.

    Attributes:
        store: the handles of its registered tensors, and this reference, keep it open.
        residency: the store's, by which its records are told from those of other stores.
        number: unique in this process.
        num_packs: how many tensors were packed. `packs`: the autograd node that saved each, and its storage's bytes.
        newest_node: the node that saved last; its kernel may still have to run.
        is_settled: the kernel of the newest node has run too.
        tracked_storages: id and size of the storage of each tensor in `on_host`, by index. `num_tracked`: how many
            tensors of each such storage there are.
        records: the record of each tensor; None while it is only tracked.
        on_host: the tensors in host memory that are only tracked, dead ones included, by index.
        on_device: likewise, those on accelerators. `storages`, `held_elsewhere`: what is charged for them: see
            `DeviceBytes`.
        tracks_on_device: tensors on accelerators may still be tracked.
        leaving: those of them that wait for enough others to leave with them, with the bytes of each.
        leaves_in_batches: some of them were too large for a group.
        remains: outlives the log; from it the store learns that the log has died.
        first_key: key of the first tensor's record.
        num_scanned: how many tensors, from the first on, were checked for other owners of their storage.
        order: what is known of the graph, and what backward asks for. `asked`: the packs that it has asked for.
        plan: where the records belong; None: no known graph begins with these packs. `num_followed`: how many packs
            were compared with it, as long as there is one.
        registers_large: room was short for a large tensor, so those that follow get a record at once: a tracked one
            would get it at the next pack.
        started: backward has asked for something.
        times: of the graph on its accelerator; None: they are not taken.
        grant: by which its thread packs without the lock; None: it takes the lock. See NOTE [Grants] in `grants.py`.
        is_behind: it was given a grant since its thread has last seen to it that its packs are entered.
        members: those tensors that are in groups, by index. Each has a `first_byte`, where its storage begins there.
        gathers: small tensors may become groups: NOTE [Groups] in `residency/groups.py`. `num_sorted`: how many packs
            there were when tensors were last sorted into groups.
        recording: the `Recorder` (`tracing/recorder.py`) of the trace that the graph is in; None: none.
        keeps_layouts: tensors have a layout as soon as they are tracked. The same for all logs: see `hooks/living.py`.
    """

    keeps_layouts: ClassVar[bool] = False
    store: object = None
    _numbers = itertools.count()

    def __init__(
        self, residency: Backward, order: GraphOrder[R], begin: Callable[[GraphLog[Any, Any]], LogRemains]
    ) -> None:
        self.number = next(self._numbers)
        self.residency = residency
        self.num_packs = 0
        self.packs: list[tuple[int, int]] = []
        self.tracked_storages: dict[int, tuple[int, int]] = {}
        self.num_tracked: dict[tuple[int, int], int] = {}
        self.records: list[R | None] = []
        self.on_host: dict[int, weakref.ref[T]] = {}
        self.on_device: dict[int, DeviceReference[T]] = {}
        self.storages: dict[int, list[Any]] = {}
        self.held_elsewhere: dict[int, int] = {}
        self.tracks_on_device = False
        self.leaving: dict[int, int] = {}
        self.leaving_bytes = 0
        self.leaves_in_batches = False
        self.remains = begin(self)
        self.newest_node = -1
        self.is_settled = False
        self.num_scanned = 0
        self.members: dict[int, Any] = {}
        self.gathers = True
        self.num_sorted = 0
        self.order = order
        self.asked = order.asked_for
        self.plan: Plan | None = None
        self.num_followed = 0
        self.registers_large = False
        self.started = False
        self.times: Any = None
        self.grant: Grant | None = None
        self.is_behind = False
        self.recording: Any = None
        self._look_at = _FIRST_LOOK_PACKS
        self.first_key = 0

    # --- forward ------------------------------------------------------------------------------------------------

    def append_registered(self, record: R, node: int) -> int:
        index = self.num_packs
        if not index:
            self.first_key = record.key
        self.is_settled = False
        self.packs.append((node, record.nbytes))
        self.records.append(record)
        self.num_packs = index + 1
        return index

    def follow_plan(self, index: int, packs: Sequence[tuple[int, int]], device: Any = None) -> None:
        """Compare packs, the first of which is pack `index`, with the graphs that are known; choose the plan to follow.
        `packs`: as this log has them. `device`: the accelerator that the first is on.

        To be called for the first pack of a log, and for each next one as long as there is a plan: after the pack, or
        before it where the plan decides whether the tensor is tracked."""
        order, first_node = self.order, (self.packs or packs)[0][0]
        while packs:
            num_alike = order.follow(index, packs, first_node)
            if num_alike < len(packs):
                self._prepare(order.predicted, device if index + num_alike == 0 else None)
                self.plan = order.plan
            self.num_followed = index = index + min(num_alike + 1, len(packs))
            packs = packs[num_alike + 1 :] if self.plan is not None else ()

    def _prepare(self, plan: Plan | None, device: Any) -> None:
        """Another plan than before is predicted. `device`: that of the first tensor."""

    def follow_entered(self) -> None:
        """The same for the packs that were entered since, if there is a plan: see NOTE [Grants] in `grants.py`."""
        self.follow_plan(self.num_followed, self.packs[self.num_followed :])

    def is_empty(self) -> bool:
        return not (self.num_packs or self.is_behind)

    def may_be_granted(self) -> bool:
        """Whether packs may do without the lock: see NOTE [Grants] in `grants.py`. A traced graph needs each index at
        once."""
        return not (self.started or self.keeps_layouts) and self.recording is None

    def settle(self) -> None:
        """Every kernel has run that saved here: see NOTE [Not before the kernel] in `hooks/scope.py`."""
        self.is_settled = True

    def let_leave(self, index: int) -> None:
        """Tracked tensor `index` is to leave with others."""
        _, self.leaving[index] = self.packs[index]
        self.leaving_bytes += self.leaving[index]

    def assign_group(self, record: R, tensors: Iterable[T]) -> None:
        """A group has the priority of the member that is needed first."""
        if self.plan is not None:
            self.plan.assign_group(record, [tracked.index for tracked in tensors], self.first_key)

    def assign(self, record: R, index: int) -> None:
        if self.plan is not None:
            self.plan.assign(record, index, self.first_key)

    def enter(self, tracked: T) -> int:
        """Returns the bytes that are tracked now and were not before: those of a storage that is new."""
        index = tracked.index
        self.on_host[index] = weakref.ref(tracked)
        self.tracked_storages[index] = storage = tracked.storage_id, self.packs[index][1]
        num_before = self.num_tracked.get(storage, 0)
        self.num_tracked[storage] = num_before + 1
        return 0 if num_before else storage[1]

    def stop_tracking(self, indices: Iterable[int]) -> int:
        """Returns the bytes that are tracked no longer."""
        on_host, num_tracked, storages = self.on_host, self.num_tracked, self.tracked_storages
        stopped_bytes = 0
        for index in indices:
            del on_host[index]
            storage = storages.pop(index)
            num_tracked[storage] -= 1
            if not num_tracked[storage]:
                del num_tracked[storage]
                stopped_bytes += storage[1]
        return stopped_bytes

    def find(self, index: int) -> T | None:
        """The saved tensor of that index, if it lives and has no record."""
        reference = self.on_host.get(index) or self.on_device.get(index)
        return None if reference is None else reference()

    def find_over(self, storage_id: int) -> T | None:
        """The first saved tensor of that storage on an accelerator that lives and has no record."""
        first: T | None = self.storages[storage_id][2]()
        if first is None or first.alias is None:  # seldom, so the others are not listed by storage
            for reference in list(self.on_device.values()):
                tracked = reference() if reference.storage_id == storage_id else None
                if tracked is not None:
                    return tracked
        return first

    def unregistered(self) -> list[T]:
        """The tensors without a record that are alive."""
        references = [*list(self.on_host.values()), *list(self.on_device.values())]
        return [tracked for reference in references if (tracked := reference()) is not None]

    def is_on_device(self) -> bool:
        """Whether nothing has left its accelerator, and nothing is on the host."""
        stays = State.PENDING, State.DEVICE
        records = [record for record in list(self.records) if record is not None]
        return not self.on_host and all(record.state in stays and record.device is not None for record in records)

    def bytes_on_device(self) -> int:
        """What the graph takes of the room on accelerators. Without the lock, as another thread may change it."""
        sizes = [nbytes for _, nbytes, _ in list(self.storages.values())]
        if any(self.records):
            records = [record for record in list(self.records) if record is not None and record.state is State.DEVICE]
            sizes += {record.key: record.nbytes for record in records}.values()
        return sum(sizes)

    def is_mostly_dead(self) -> bool:
        """Whether most of its tensors are dead. Checked only each time the number of packs has doubled, else False."""
        if self.num_packs < self._look_at:
            return False
        self._look_at = 2 * self.num_packs
        num_registered = sum(1 for record in list(self.records) if record is not None and record.is_alive)
        return 2 * (len(self.unregistered()) + num_registered) < self.num_packs

    def settled(self, among: Mapping[int, weakref.ref[T]]) -> list[tuple[int, T | None]]:
        """(index, tensor) of those `among` these that may be read; None: it has died."""
        packs, unsettled = self.packs, None if self.is_settled else self.newest_node
        return [(index, reference()) for index, reference in sorted(among.items()) if packs[index][0] != unsettled]

    def unscanned(self) -> dict[int, list[T]]:
        """The settled tensors, by storage, that this has not returned before."""
        by_storage: dict[int, list[T]] = {}
        for index in range(self.num_scanned, self.num_packs):
            if not self.is_settled and self.packs[index][0] == self.newest_node:
                break
            self.num_scanned = index + 1
            among = self.on_host if index in self.on_host else self.on_device
            tracked = among[index]() if index in among else None  # as `find`, without its calls
            if tracked is None:
                continue
            if tracked.storage_id in by_storage:
                by_storage[tracked.storage_id].append(tracked)
            else:
                by_storage[tracked.storage_id] = [tracked]
        return by_storage

    def come_in(self, indices: Sequence[int], record: R) -> None:
        """The record of those tensors, which had none until now."""
        for index in indices:
            self.records[index] = record
        if self.recording is not None:
            for index in indices:
                self.recording.booked(self.number, index, record.key)
        if self.order.is_followed:
            self.order.come_in(indices, record)

    # --- backward -----------------------------------------------------------------------------------------------

    def start(self, index: int) -> None:
        """Backward begins: it asks for saved tensor `index`."""
        self.started = True
        self.plan = None
        self.residency.begin_backward(self)
        for record in self.records:
            if record is not None and record.state is not State.PENDING:
                self.look_ahead()
                if self.records[index] is None:  # one with a record looks ahead as it is fetched
                    self.residency.look_ahead(self.order.lookahead)
                break

    def look_ahead(self) -> None:
        """Something has left its place: from now on, what will be asked for is brought back before."""
        self.order.look_ahead(self.copied_packs(), self.records)
        ending = self.order.ending(self.times)
        if ending is not None:
            self.remains.then = ending

    def copied_packs(self) -> Packs[R]:
        """Copies of the lists, as far as packs are complete: another thread may be in one; its record comes last."""
        records = list(self.records)
        packs = self.packs[: len(records)]
        on_device = [
            index in self.on_device if record is None else record.device is not None
            for index, record in enumerate(records)
        ]
        nodes, sizes = [node for node, _ in packs], [nbytes for _, nbytes in packs]
        return Packs(nodes, sizes, records, self._storages(records), on_device)

    def _storages(self, records: Sequence[R | None]) -> list[int]:
        """For each pack, the number of its storage: packs of one storage have the same, unless they are dead."""
        numbers = [-1 - index if record is None else record.key for index, record in enumerate(records)]
        num_packs = len(numbers)
        for index, member in list(self.members.items()):
            if index < num_packs:
                numbers[index] = numbers[index] << _KEY_SHIFT | member.first_byte
        for tracked in self.unregistered():
            if tracked.index < num_packs:
                numbers[tracked.index] = -tracked.storage_id  # an address, so it is none of the numbers above
        return numbers


class LogRemains(Remains[GraphLog[Any, Any]]):
    """The data of a log that the store needs after the log has died.

    `then`: called when the store accounts for the log's death, under the store's lock."""

    __slots__ = ("held_elsewhere", "num_tracked", "number", "on_device", "on_host", "storages", "then")

    def __init__(self, log: GraphLog[Any, Any], note_death: Callable[[LogRemains], None]) -> None:
        self.number = log.number
        self.on_host = log.on_host
        self.on_device = log.on_device
        self.storages = log.storages
        self.held_elsewhere = log.held_elsewhere
        self.num_tracked = log.num_tracked
        self.then: Callable[[], None] | None = None

"""Saved tensors that have no record yet: the store only counts their bytes.

NOTE [Tracked, then registered]
In most programs, most graphs are freed while the budget still has room for everything that they saved. Such tensors
only have to be guarded against changes. So a pack only *tracks* a tensor: the packed object keeps an alias of it, its
version and the address of its storage, and the store adds its bytes to a count. There is no record and no handle;
backward gets the alias. This costs a third of what a record costs.

A tracked tensor is *registered*, that is, it gets a record, when the count says that room may be short, when its scope
has ended and somebody else also holds its storage, or when somebody asks for its handle or for exact figures. The
tensors of one log are registered in the order of packing. Views of one storage then share a record, as if each had been
registered when it was packed. The store ignores a tensor that dies before it is registered. Its bytes stay in the count
until its log dies, or until `TrackedTensors.take` finds it dead. On an accelerator a tensor is tracked in the same way:
see `on_device.py`.

The packed object drops its alias only after the record has an alias of its own. A thread that read the alias just
before, to give it to autograd, counts as one more owner of the storage while it uses it."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic

from .grants import Entry, Grant
from .log import GraphLog, LogRemains, T
from .on_device import DeviceBytes, DeviceReference, UnseenBytes, UnseenGraph
from .record import R
from .windows import HostWindows, Window


class TrackedTensors(Generic[T, R]):
    """All tensors that a store has only tracked. Guarded by the store's lock.

    Attributes:
        num_bytes: bytes of those in host memory, an upper bound: dead tensors that were not found yet are included.
        granted_bytes: charged there for tensors that may still come: see NOTE [Grants] in `grants.py`.
        on_device: bytes of tensors on accelerators.
        keys: of records.
        ended: remains of logs that have died, see NOTE [No finalizers] in `remains.py`, and of graphs without one.
    """

    def __init__(self, windows: HostWindows, resident: Window) -> None:
        self._windows = windows
        self.num_bytes = self.granted_bytes = 0
        self.grants: dict[LogRemains, Grant] = {}
        self.on_device = DeviceBytes(resident)
        self.keys = itertools.count(1)
        self.ended: deque[LogRemains | UnseenBytes] = deque()
        self._begun: set[LogRemains] = set()  # keeps the remains of every log alive
        self._logs: dict[int, LogRemains] = {}  # logs with tracked tensors, by number

    def begin(self, log: GraphLog[Any, Any]) -> LogRemains:
        remains = LogRemains(log, self.ended.append)
        self._begun.add(remains)
        return remains

    def add(self, tracked: T, node: int, nbytes: int) -> int:
        """Track a tensor that autograd node `node` saved. Every pack calls it.

        Returns by how many bytes more is tracked in host memory: 0 for one more view of a tracked storage."""
        log = tracked.log
        if not (log.on_host or log.on_device):
            self.drop_ended()
            self._logs[log.number] = log.remains
        tracked.index = index = log.num_packs
        if not index:
            log.first_key = tracked.key
        log.is_settled = False
        log.packs.append((node, nbytes))
        log.records.append(None)
        log.num_packs = index + 1
        if tracked.device is not None:
            self.on_device.add(tracked, log, index, tracked.storage_id, nbytes)
            return 0
        log.on_host[index] = weakref.ref(tracked)
        log.tracked_storages[index] = storage = tracked.storage_id, nbytes  # as `GraphLog.enter`, without its call
        num_tracked = log.num_tracked
        if storage in num_tracked:
            num_tracked[storage] += 1
            return 0
        num_tracked[storage] = 1
        self.num_bytes += nbytes
        return nbytes

    def grant(self, log: GraphLog[T, R], grant: Grant) -> None:
        """Let the log's thread track more without the lock."""
        self.grants[log.remains] = grant
        self._charge_grant(grant, grant.nbytes)
        log.is_behind = True
        log.grant = grant

    def end_grant(self, remains: LogRemains) -> Sequence[Entry]:
        """End the grant of one log, and enter what was packed by it; returns that."""
        grant = self.grants.pop(remains)
        self._charge_grant(grant, -grant.nbytes)
        log = remains()
        if log is not None:
            log.grant = None
        entries = grant.journal[:]  # one more may be appended in vain
        if log is not None and entries:
            self._enter(log, grant, entries)
        return entries

    def _charge_grant(self, grant: Grant, nbytes: int) -> None:
        if grant.device is None:
            self.granted_bytes += nbytes
        else:
            self.on_device.resident.granted_bytes += nbytes

    def abandon_grants(self) -> None:
        """In a forked child."""
        for remains in list(self.grants):
            log = remains()
            if log is not None:
                log.grant = None
        self.grants.clear()

    def _enter(self, log: GraphLog[T, R], grant: Grant, entries: Sequence[Entry]) -> None:
        """As `add` for each, without its calls."""
        if not (log.on_host or log.on_device):
            self.drop_ended()
            self._logs[log.number] = log.remains
        on_host, storages, num_tracked = log.on_host, log.tracked_storages, log.num_tracked
        on_device, charged, resident = log.on_device, log.storages, self.on_device.resident
        index = log.num_packs
        log.is_settled = False
        log.newest_node, _ = entries[-1][1]
        log.packs += [pack for _, pack in entries]
        log.records += [None] * len(entries)
        log.num_packs = index + len(entries)
        for (reference, (_, nbytes)), key in zip(entries, self.keys):  # noqa: B905 - there are always more keys
            tracked = reference()
            if tracked is not None:
                tracked.index, tracked.key = index, key
                if grant.device is None:
                    on_host[index] = reference
                    storages[index] = storage = tracked.storage_id, nbytes
                    if storage in num_tracked:
                        num_tracked[storage] += 1
                    else:
                        num_tracked[storage] = 1
                        self.num_bytes += nbytes
                else:
                    reference.index, reference.log_number = index, log.number
                    reference.storage_id = storage_id = tracked.storage_id
                    on_device[index] = reference
                    if storage_id in charged:
                        charged[storage_id][0] += 1
                    else:
                        charged[storage_id] = [1, nbytes, reference]
                        resident.used_bytes += nbytes
                    if grant.leaves:  # as `GraphLog.let_leave`
                        log.leaving[index] = nbytes
                        log.leaving_bytes += nbytes
            index += 1

    def drop_ended(self) -> None:
        """Stop counting the bytes of dead logs, and of dead tensors on accelerators; call the `then` of dead logs."""
        while self.ended:
            remains = self.ended.popleft()
            if isinstance(remains, UnseenBytes):
                self.on_device.end_unseen(remains)
                continue
            self._begun.discard(remains)
            self._logs.pop(remains.number, None)
            self.num_bytes -= sum([nbytes for _, nbytes in remains.num_tracked])
            if remains.storages:
                self.on_device.end(remains, is_gone=True)
            self._windows.keep_tracked(self.num_bytes)
            if remains.then is not None:
                remains.then()
        if self.on_device.dead:
            for log in self.on_device.drop_dead(self._logs):
                self._strike_out(log)

    def take(self) -> list[T]:
        """Remove and return every settled tensor in host memory that is alive; dead ones are removed too."""
        taken = []
        for log in self._living_logs():
            settled = log.settled(log.on_host)
            self._stop_tracking(log, [index for index, _ in settled])
            taken += [tracked for _, tracked in settled if tracked is not None]
        return taken

    def put_back(self, tensors: Iterable[T]) -> None:
        """They were taken, and stay tracked."""
        for tracked in tensors:
            log, index = tracked.log, tracked.index
            self._logs[log.number] = log.remains
            if tracked.device is None:
                self.num_bytes += log.enter(tracked)
            else:
                self.on_device.add(tracked, log, index, tracked.storage_id, log.packs[index][1])
                log.let_leave(index)

    def end_round(self) -> None:
        """What is tracked now was put back, or is not settled."""
        for log in self._living_logs():
            log.num_sorted = log.num_packs

    def take_on_device(self, of: GraphLog[T, R] | None = None) -> list[T]:
        """The same for those on accelerators, of one log or of all, those saved first first."""
        taken = []
        for log in self._living_logs() if of is None else (of,):
            taken += self._take_on_device(log, log.on_device)
            log.leaving, log.leaving_bytes = {}, 0
            if not log.tracks_on_device:
                for index in log.on_device:
                    log.let_leave(index)
        return sorted(taken, key=attrgetter("key"))

    def take_leaving(self, log: GraphLog[T, R]) -> list[T]:
        """The same for those on accelerators that wait to leave. What is not settled waits on."""
        leaving = log.leaving
        log.leaving, log.leaving_bytes = {}, 0
        waiting = {index: log.on_device[index] for index in leaving if index in log.on_device}
        taken = self._take_on_device(log, waiting)
        for index in waiting:
            if index in log.on_device:
                log.let_leave(index)
        return taken

    def _take_on_device(self, log: GraphLog[T, R], among: Mapping[int, DeviceReference[T]]) -> list[T]:
        settled = log.settled(among)
        self._stop_tracking_on_device(log, [index for index, _ in settled])
        return [tracked for _, tracked in settled if tracked is not None]

    def _living_logs(self) -> list[GraphLog[T, R]]:
        return [log for reference in list(self._logs.values()) if (log := reference()) is not None]

    def remove(self, tracked: T) -> None:
        if tracked.device is None:
            self._stop_tracking(tracked.log, (tracked.index,))
        else:
            self._stop_tracking_on_device(tracked.log, (tracked.index,))

    def _stop_tracking(self, log: GraphLog[T, R], indices: Iterable[int]) -> None:
        self.num_bytes -= log.stop_tracking(indices)
        if self._windows.tracked_bytes:
            self._windows.keep_tracked(self.num_bytes)
        self._strike_out(log.remains)

    def _stop_tracking_on_device(self, log: GraphLog[T, R], indices: Iterable[int]) -> None:
        self.on_device.remove(log, indices)
        self._strike_out(log.remains)

    def _strike_out(self, log: LogRemains) -> None:
        if not (log.on_host or log.on_device):
            self._logs.pop(log.number, None)

    def num_over(self, storage_id: int) -> int:
        """How many tracked tensors on accelerators that storage has, in all logs; dead ones may be among them."""
        return sum([log.storages[storage_id][0] for log in self._logs.values() if storage_id in log.storages])

    def living(self) -> Iterator[T]:
        for log in self._living_logs():
            yield from log.unregistered()

    def charge_unseen(self, graph: UnseenGraph, nbytes: int) -> None:
        self.on_device.charge_unseen(graph, nbytes, self.ended.append)

    def give_up(self) -> None:
        """The store is closed: charge nothing any more."""
        for unseen in list(self.on_device.unseen):
            self.on_device.end_unseen(unseen)
        for remains in list(self._begun):  # any thread begins a log
            self.on_device.end(remains, is_gone=False)

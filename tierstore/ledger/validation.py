"""Whether the books are whole: what must hold whenever the lock of a store is let go of.

`Ledger.validate` is called then if the environment variable `TIERSTORE_VALIDATE` is "1" (`residency/guard.py`), and by
tests. It looks at everything, so it takes time that grows with the number of records and of tracked tensors. It is part
of the product so that the report of a bug can have its error, which names the record and tells its story.

It looks into the parts of the ledger, as tests do: a change of how one keeps its records may be a change here. Only
the eviction order, which may be another class, says by itself what is in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from .state import State
from .story import story_of

if TYPE_CHECKING:
    from .device import DeviceRules
    from .ledger import Ledger
    from .log import LogRemains
    from .record import RuledRecord
    from .tracked import TrackedTensors


class InvalidBooksError(AssertionError):
    """The books of a store are not whole, which is a bug of tierstore; `record`: of the record that shows it, if one
    does. Whatever was to be done has been done. Nothing that is stored is safe any more."""

    def __init__(self, what: str, record: RuledRecord | None = None) -> None:
        if record is not None:
            window = "no window" if record.window is None else f"{record.charged_bytes} bytes charged"
            found = f"handle {record.key} ({record.state.name}, {record.nbytes} bytes, {window})"
            what = f"{found}: {what}\n{story_of(record)}"
        super().__init__(what)
        self.record = record


class _Place(NamedTuple):
    """Where a record of some state is. `queues`: it is in one of these, or, if it `may_be_nowhere`, in none. `also`: it
    may be in these besides. `windows`: those that may be charged with it; "": none is. `has_slot`: None: either."""

    queues: Collection[str] = ()
    also: Collection[str] = ()
    windows: Collection[str] = ("",)
    may_be_nowhere: bool = False
    has_slot: bool | None = None


_BOTH = "host", "staging"
_PLACES: Mapping[State, _Place] = {
    State.PENDING: _Place(("fresh", "shared", "blocked"), may_be_nowhere=True),  # nowhere until it is settled
    State.DEVICE: _Place(("resident",), ("blocked", "leaving its device"), has_slot=False),
    State.OFFLOADING: _Place(("dirty",), ("leaving", "copied back"), ("host",), has_slot=True),
    State.HOST: _Place(("dirty", "asked"), ("leaving", "unspilled", "copied back"), _BOTH),
    State.QUEUED: _Place(("writes", "small writes"), ("copied back",), ("staging",)),
    State.WRITING: _Place(("running",), ("copied back",), ("staging",)),
    State.CLEAN: _Place(("clean", "used"), ("copied back",), _BOTH, may_be_nowhere=True),
    State.DISK: _Place(has_slot=False),
    State.READING: _Place(("demanded reads", "reads ahead", "running"), (), _BOTH, has_slot=True),
    State.FAILED: _Place(has_slot=False),
    State.DOOMED: _Place(("running",), ("copied back",), _BOTH),
    State.FREED: _Place(has_slot=False),
    State.CLOSED: _Place(("running",), (), ("", *_BOTH), may_be_nowhere=True),
}
"""Beside the table in `state.py`: the queues, and the charge, of a record in each state."""


def validate(ledger: Ledger[Any]) -> None:
    """Raise InvalidBooksError at the first rule that does not hold. Under the store's lock; changes nothing."""
    books = ledger.books
    records = dict(books.records)
    for record in books.jobs.running:
        if records.setdefault(record.key, record) is not record:
            raise InvalidBooksError("another record has its key", record)
    queues = _queues(ledger)
    _validate_places(ledger, records, queues)
    _validate_sums(ledger, records.values())
    _validate_jobs(ledger, queues)
    for counter in fields(books.counters):
        found = getattr(books.counters, counter.name)
        for count in found.values() if isinstance(found, dict) else (found,):
            _must(count >= 0, f"the counter {counter.name} is {count}")
    if not books.is_closed:
        _validate_tracked(books.tracked, ledger.device)
        _validate_device(ledger.device, records.values())


def _must(holds: bool, what: str, record: RuledRecord | None = None) -> None:
    if not holds:
        raise InvalidBooksError(what, record)


def _equal(found: int, expected: int, what: str) -> None:
    _must(found == expected, f"{what}: {found}, but it should be {expected}")


def _queues(ledger: Ledger[Any]) -> dict[str, Mapping[int, RuledRecord]]:
    books, device = ledger.books, ledger.device
    pending, jobs = books.pending, books.jobs
    _equal(len(set(books.blocked)), len(books.blocked), "records that are blocked once")
    return {
        "fresh": pending._fresh,
        "shared": pending._shared,
        "blocked": {record.key: record for record in books.blocked},
        "resident": {key: record for key, (record, _) in device.window._resident.items()},
        "leaving its device": device.window._leaving,
        "copied back": {key: reload.record for key, reload in device._reloaded.items()},
        **books.eviction.queues,
        "unspilled": books.unspilled,
        "writes": jobs._writes,
        "small writes": jobs._small_writes,
        "demanded reads": jobs._demanded_reads,
        "reads ahead": jobs._reads_ahead,
        "running": {record.key: record for record in jobs.running},
    }


def _validate_places(
    ledger: Ledger[Any], records: Mapping[int, RuledRecord], queues: Mapping[str, Mapping[int, RuledRecord]]
) -> None:
    """Each record is where its state says, and nowhere else."""
    found: dict[int, list[str]] = {key: [] for key in records}
    windows = ledger.books.windows
    names = {None: "", windows.host: "host", windows.staging: "staging"}
    for name, queue in queues.items():
        for key, record in queue.items():
            _must(key == record.key, f"is queued in {name} as {key}", record)
            is_gone = record.state is State.FREED and name == "blocked"  # it is struck off when its turn comes
            _must(records.get(key) is record or is_gone, f"is in {name}, but not registered", record)
            if not is_gone:
                found[key].append(name)
    for key, record in records.items():
        place, where = _PLACES[record.state], found[key]
        num_in, num_also = (sum(name in names_of for name in where) for names_of in (place.queues, place.also))
        words = f"is in {' and '.join(where) or 'no queue'}"
        _must(num_in <= 1 and num_in + num_also == len(where), words, record)
        _must(num_in == 1 or not place.queues or place.may_be_nowhere, words, record)
        _must(names.get(record.window, "another") in place.windows, "is charged to the wrong window", record)
        _must(record.charged_bytes == (0 if record.window is None else record.nbytes), "has the wrong charge", record)
        if place.has_slot is not None:
            _must((record.slot is not None) is place.has_slot, "has a slot, or has none", record)
        _must((record.held is not None) is ("running" in where), "holds memory, but no job runs, or the like", record)
        _must("leaving" not in where or "dirty" in where, "is to leave, but is not dirty", record)
        is_in_staging = record.state is State.HOST and record.window is windows.staging
        _must(("unspilled" in where) is is_in_staging, "takes room of staging without leaving, or the like", record)
        is_loose = record.state is State.CLEAN and not num_in and not record.demanded
        _must(not is_loose, "can never leave", record)
        _must(record.state is not State.FAILED or record.cause is not None, "has failed without a cause", record)
        _must(record.state is not State.FREED or not record.is_alive, "is freed, but its handle lives", record)
        _must((record.state is State.CLOSED) <= ledger.books.is_closed, "is closed before the store", record)
        _must(record.state is not State.DOOMED or key not in ledger.books.records, "is doomed and registered", record)
        _must(record.demanded >= 0 and record.num_members >= 1 and record.stored_bytes >= 0, "counts below 0", record)


def _validate_sums(ledger: Ledger[Any], records: Collection[RuledRecord]) -> None:
    """What is summed up as it changes is the sum."""
    books, windows, pending = ledger.books, ledger.books.windows, ledger.books.pending
    for name, window, others in (("host", windows.host, 0), ("staging", windows.staging, windows.tracked_bytes)):
        charged = sum(record.charged_bytes for record in records if record.window is window)
        _equal(window.used_bytes, charged + others, f"bytes charged to {name}")
    _equal(windows.outstanding.used_bytes, ledger._memory.outstanding_bytes(), "outstanding bytes")
    _must(0 <= windows.tracked_bytes <= books.tracked.num_bytes, "staging is charged with more than is tracked")
    shared_bytes = _bytes_of(pending._shared.values())
    _equal(pending.shared_bytes, shared_bytes, "pending bytes that others hold")
    _equal(pending.num_bytes, shared_bytes + _bytes_of(pending._fresh.values()), "pending bytes")
    for record in pending._fresh.values():
        _must(record.device is None or pending.must_be_scanned, "need not be scanned, but is to leave", record)
    _equal(books.disk_bytes, sum(record.stored_bytes for record in records), "bytes on disk")
    _must(books.disk_bytes <= books.disk_bytes_peak, "the peak of the bytes on disk is lower than their number")
    _must(books.num_packing >= 0, "less than no thread waits for room")
    num_demanded = sum(record.demanded for record in records)
    _must(0 <= books.num_getting <= num_demanded, f"{books.num_getting} threads wait for {num_demanded} records")
    explicit = books.explicit_prefetch
    for key, record in {**explicit.waiting, **explicit._fetched}.items():
        _must(key not in explicit.waiting or key not in explicit._fetched, "is to be fetched, and was", record)
        _must(books.records.get(key) is record, "is to be fetched explicitly, but not registered", record)
    if (ahead := books.ahead) is not None:
        _equal(ahead._ahead_bytes, sum(ahead._ahead.values()), "bytes that are fetched ahead")


def _bytes_of(records: Iterable[RuledRecord]) -> int:
    return sum(record.nbytes for record in records)


def _validate_jobs(ledger: Ledger[Any], queues: Mapping[str, Mapping[int, RuledRecord]]) -> None:
    """As many jobs are counted as are queued or running. Which job a record had whose handle is gone, nothing tells."""
    books, jobs = ledger.books, ledger.books.jobs
    _equal(jobs._small_bytes, _bytes_of(jobs._small_writes.values()), "bytes of small writes")
    states = Counter(record.state for record in jobs.running)
    writes = jobs.num_writes - len(queues["writes"]) - len(queues["small writes"])
    reads = jobs.num_reads - len(queues["demanded reads"]) - len(queues["reads ahead"])
    _must(jobs.num_discards >= len(jobs._discards), "more is to be discarded than was counted")
    if not books.is_closed:
        _must(writes >= states[State.WRITING], f"{states[State.WRITING]} writes run, but {writes} are counted")
        _must(reads >= states[State.READING], f"{states[State.READING]} reads run, but {reads} are counted")
        _equal(writes + reads, len(jobs.running), "jobs that run")


def _validate_tracked(tracked: TrackedTensors[Any, Any], device: DeviceRules[Any]) -> None:
    """What is charged for tensors without a record is what the logs list, and what was granted to them."""
    num_bytes, resident_bytes = 0, sum(nbytes for _, nbytes in device.window._resident.values())
    resident_bytes += sum(unseen.nbytes for unseen in tracked.on_device.unseen)
    for remains in list(tracked._begun):  # any thread begins a log
        num_bytes += sum(nbytes for _, nbytes in remains.num_tracked)
        resident_bytes += sum(nbytes for _, nbytes, _ in remains.storages.values())
        _validate_log(tracked, remains)
    _equal(tracked.num_bytes, num_bytes, "tracked bytes")
    _equal(tracked.on_device.resident.used_bytes, resident_bytes, "bytes that stay on devices")
    grants = tracked.grants.values()
    _equal(tracked.granted_bytes, sum(grant.nbytes for grant in grants if grant.device is None), "granted bytes")
    granted_bytes = sum(grant.nbytes for grant in grants if grant.device is not None)
    _equal(tracked.on_device.resident.granted_bytes, granted_bytes, "bytes granted on devices")


def _validate_log(tracked: TrackedTensors[Any, Any], remains: LogRemains) -> None:
    log, name = remains(), f"log {remains.number}"
    if remains.on_host or remains.on_device:
        _must(remains.number in tracked._logs, f"{name} tracks tensors, but nobody knows")
    of_storages = Counter(reference.storage_id for reference in remains.on_device.values())
    counted = {storage: num_tensors for storage, (num_tensors, *_) in remains.storages.items()}
    _must(of_storages == counted, f"{name} counts tensors on devices by storage: {counted}, but it has {of_storages}")
    held = [remains.storages.get(storage) for storage in remains.held_elsewhere]
    _must(all(each and not each[1] for each in held), f"{name} is charged for what others hold, or has it no longer")
    if log is None:
        return
    _must(Counter(log.tracked_storages.values()) == log.num_tracked, f"{name} counts other tensors than it tracks")
    _must(log.on_host.keys() == log.tracked_storages.keys(), f"{name} tracks tensors of no storage, or none of one")
    _must(len(log.packs) == len(log.records) == log.num_packs, f"{name} has lost a pack")
    for index in (*log.on_host, *log.on_device):
        _must(log.records[index] is None, f"is pack {index} of {name}, which is only tracked", log.records[index])
    _equal(log.leaving_bytes, sum(log.leaving.values()), f"bytes of {name} that wait to leave")
    _must(log.grant is tracked.grants.get(remains), f"{name} has a grant that nobody knows")
    for record, num_members in Counter(log.records[index] for index in log.members).items():
        _must(record is not None and record.num_members == num_members, f"has {num_members} members", record)


def _validate_device(device: DeviceRules[Any], records: Iterable[RuledRecord]) -> None:
    """The windows of accelerators are charged with what is there, and nothing else of ours is there."""
    window, reloaded = device.window, device._reloaded
    _equal(window.in_flight.used_bytes, sum(flight.copy.nbytes for flight in device.flights), "bytes being copied out")
    _equal(window.reloaded.used_bytes, sum(reload.nbytes for reload in reloaded.values()), "bytes copied back")
    num_ahead = sum(reload.memory is not None for reload in reloaded.values())
    _equal(device._num_ahead, num_ahead, "records copied back ahead")
    flying = {flight.record.key for flight in device.flights}
    for record in records:
        if record.device is not None and record.state not in (State.PENDING, State.DEVICE):
            is_known = record.key in reloaded or record.key in flying
            _must(is_known or not record.has_device_bytes, "has memory on its device that nobody counts", record)
        _must(record.device is not None or record.key not in reloaded, "is copied back to no device", record)
    _must(device.too_large <= {record.key for record in records}, "the device had no room for a record that is gone")

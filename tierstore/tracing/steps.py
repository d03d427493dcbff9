"""A trace, taken apart into steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ConfigError
from .events import (
    Booked,
    Event,
    Gone,
    Levels,
    Offload,
    Ours,
    Pack,
    Release,
    Reload,
    Restore,
    Scope,
    ScopeEnd,
    Spill,
    Stall,
    Unpack,
)
from .reader import RecordedTrace

__all__ = ["Step", "Wait", "choose_step", "records_of", "steps_of", "thread_names_of"]

_T = TypeVar("_T")
_ONE_WAIT_NS = 1_000_000
"""A thread that waits is woken by whatever progress there is, and waits again: within this time it is the same wait."""


@dataclass(frozen=True)
class Wait:
    """A thread waited, however often it was woken meanwhile. Fields as `Stall`'s."""

    began_ns: int
    end_ns: int
    thread: int
    cause: str
    record: int | None


@dataclass(frozen=True)
class Step:
    """One graph, from the scope that began it until it was gone, and what the store did meanwhile.

    Attributes:
        number: counted from 1 in the trace.
        graph, thread: which, and who packed it.
        began_ns: its first scope was entered.
        forward_ended_ns: its last scope was left.
        backward_began_ns: it was asked for something first; None: never.
        ended_ns: it was gone, or where the trace ends.
        is_whole: it was seen to be gone.
        scope: the options of its first scope.
        packs, unpacks, releases, ours: of the graph.
        waits: of all threads.
        spills, restores, offloads, reloads, levels: of the store, as far as they were not over before.
        memory: the end of its last scope, with what the process held then; None: that was not recorded.
        codecs: what each record is encoded with, as far as the trace has seen it written.
    """

    number: int
    graph: int
    thread: int
    began_ns: int
    forward_ended_ns: int
    backward_began_ns: int | None
    ended_ns: int
    is_whole: bool
    scope: Scope | None
    packs: Sequence[Pack]
    unpacks: Sequence[Unpack]
    releases: Sequence[Release]
    ours: Sequence[Ours]
    waits: Sequence[Wait]
    spills: Sequence[Spill]
    restores: Sequence[Restore]
    offloads: Sequence[Offload]
    reloads: Sequence[Reload]
    levels: Sequence[Levels]
    codecs: dict[int, str]
    memory: ScopeEnd | None = None


def steps_of(trace: RecordedTrace) -> list[Step]:
    """Every graph of the trace that something was packed of, the earliest first."""
    events = _Events(trace.events)
    firsts: dict[int, Pack] = {}
    for pack in sorted(events.of(Pack), key=lambda pack: pack.began_ns):
        firsts.setdefault(pack.graph, pack)
    return [_step(number, first, events) for number, first in enumerate(firsts.values(), 1)]


def choose_step(steps: Sequence[Step], number: int | None) -> Step:
    """The step of that number; None: the one that waited longest, for that is what a trace is looked at for.

    Raises:
        ConfigError: there is none.
    """
    if number is None:
        return max(steps, key=lambda step: (sum(wait.end_ns - wait.began_ns for wait in step.waits), -step.number))
    if not 1 <= number <= len(steps):
        raise ConfigError("--step", number, f"the trace has steps 1 to {len(steps)}")
    return steps[number - 1]


def records_of(events: Iterable[Event]) -> dict[tuple[int, int], int]:
    """Of each saved tensor, by graph and index, the record that it is a view of.

    Tensors that were never booked are views of one record if their storage was the same, alive, and unchanged.
    """
    packs = [event for event in events if isinstance(event, Pack)]
    records = {(pack.graph, pack.index): pack.record for pack in packs if pack.record is not None}
    records |= {(event.graph, event.index): event.record for event in events if isinstance(event, Booked)}
    releases = {(event.graph, event.index): event.at_ns for event in events if isinstance(event, Release)}
    latest: dict[tuple[int, int, int], tuple[int, float]] = {}  # record of a storage, and how long that lived at least
    for pack in sorted(packs, key=lambda pack: pack.began_ns):
        name = pack.graph, pack.index
        if name in records:
            continue
        storage = pack.graph, pack.storage, pack.version
        record, alive_until_ns = latest.get(storage, (pack.key, 0.0))
        if alive_until_ns < pack.began_ns:
            record = pack.key
        latest[storage] = record, max(alive_until_ns, releases.get(name, float("inf")))
        records[name] = record
    return records


def thread_names_of(trace: RecordedTrace) -> dict[int, str]:
    """Of the threads that entered a scope, by their number."""
    return {event.thread: event.thread_name for event in trace.events if isinstance(event, Scope)}


class _Events:
    """The events of a trace by kind. What is asked for must have the fields that the question is about."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_kind: dict[type, list[Any]] = {}
        self.last_ns = 0
        for event in events:
            self._by_kind.setdefault(type(event), []).append(event)
            self.last_ns = max(self.last_ns, getattr(event, "end_ns", 0), getattr(event, "at_ns", 0))

    def of(self, kind: type[_T]) -> list[_T]:
        return self._by_kind.get(kind, [])

    def of_graph(self, kind: type[_T], graph: int) -> list[_T]:
        return [event for event in self._by_kind.get(kind, []) if event.graph == graph]

    def lasting(self, kind: type[_T], began_ns: int, ended_ns: int) -> list[_T]:
        """Events of a kind that has a beginning and an end, as far as they were under way in that time."""
        events = self._by_kind.get(kind, [])
        return [event for event in events if event.end_ns > began_ns and event.began_ns < ended_ns]

    def within(self, kind: type[_T], began_ns: int, ended_ns: int) -> list[_T]:
        return [event for event in self._by_kind.get(kind, []) if began_ns <= event.at_ns <= ended_ns]


def _step(number: int, first: Pack, events: _Events) -> Step:
    graph = first.graph
    packs, unpacks = events.of_graph(Pack, graph), events.of_graph(Unpack, graph)
    numbers = {pack.scope for pack in packs}
    scopes = [scope for scope in events.of(Scope) if scope.scope in numbers]
    scope_ends = [end for end in events.of(ScopeEnd) if end.scope in numbers]
    ends = [end.at_ns for end in scope_ends]
    gone = events.of_graph(Gone, graph)
    began_ns = min([scope.at_ns for scope in scopes] or [first.began_ns])
    ended_ns = max(gone[-1].at_ns if gone else events.last_ns, *ends, began_ns + 1)
    return Step(
        number=number,
        graph=graph,
        thread=first.thread,
        began_ns=began_ns,
        forward_ended_ns=max(ends) if ends else max(pack.end_ns for pack in packs),
        backward_began_ns=min((unpack.began_ns for unpack in unpacks), default=None),
        ended_ns=ended_ns,
        is_whole=bool(gone),
        scope=scopes[0] if scopes else None,
        packs=packs,
        unpacks=unpacks,
        releases=events.of_graph(Release, graph),
        ours=events.of_graph(Ours, graph),
        waits=_waits(events.lasting(Stall, began_ns, ended_ns)),
        spills=events.lasting(Spill, began_ns, ended_ns),
        restores=events.lasting(Restore, began_ns, ended_ns),
        offloads=events.within(Offload, began_ns, ended_ns),
        reloads=events.within(Reload, began_ns, ended_ns),
        levels=sorted(events.within(Levels, began_ns, ended_ns), key=lambda level: level.at_ns),
        codecs={spill.record: spill.codec for spill in events.of(Spill)},
        memory=max((end for end in scope_ends if end.resident_bytes), key=lambda end: end.at_ns, default=None),
    )


def _waits(stalls: Iterable[Stall]) -> list[Wait]:
    waits: list[Wait] = []
    last: dict[int, int] = {}  # of each thread, the index of its last wait
    for stall in sorted(stalls, key=lambda stall: stall.began_ns):
        before = waits[last[stall.thread]] if stall.thread in last else None
        is_same = before is not None and (before.cause, before.record) == (stall.cause, stall.record)
        if before is not None and is_same and stall.began_ns - before.end_ns < _ONE_WAIT_NS:
            end_ns = max(before.end_ns, stall.end_ns)  # they may overlap by what rounding makes of a time
            waits[last[stall.thread]] = Wait(before.began_ns, end_ns, stall.thread, stall.cause, stall.record)
        else:
            last[stall.thread] = len(waits)
            waits.append(Wait(stall.began_ns, stall.end_ns, stall.thread, stall.cause, stall.record))
    return waits

"""A trace, taken apart into steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from ..errors import ConfigError
from .events import (
    Booked,
    Event,
    Gone,
    Levels,
    Offload,
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

_T = TypeVar("_T")
_ONE_WAIT_NS = 1_000_000  # any progress wakes a waiting thread; after a shorter gap it is still the same wait


@dataclass(frozen=True)
class Step:
    """One graph, from the scope that began it until it was gone, and what the store did meanwhile.

    Attributes:
        number: counted from 1 in the trace.
        began_ns, forward_ended_ns: when its first scope (`scope`) was entered, and its last one left.
        backward_began_ns: when its first unpack began; None: there was none.
        ended_ns: when it was gone (`is_whole`), or the end of the trace.
        waits, spills, restores, offloads, reloads, levels: of the whole store, all threads, during the step.
        codecs: the codec of each record, where the trace has its write.
        memory: the end of its last scope, with the memory that the process held; None: not recorded.
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
    waits: Sequence[Stall]
    spills: Sequence[Spill]
    restores: Sequence[Restore]
    offloads: Sequence[Offload]
    reloads: Sequence[Reload]
    levels: Sequence[Levels]
    codecs: dict[int, str]
    memory: ScopeEnd | None = None


def steps_of(trace: RecordedTrace) -> list[Step]:
    """Every graph of the trace that has a pack, the earliest first."""
    events = _Events(trace.events)
    firsts: dict[int, Pack] = {}
    for pack in sorted(events.of(Pack), key=lambda pack: pack.began_ns):
        firsts.setdefault(pack.graph, pack)
    return [_step(number, first, events) for number, first in enumerate(firsts.values(), 1)]


def choose_step(steps: Sequence[Step], number: int | None) -> Step:
    """The step of that number; None: the one that waited longest, which is what a reader most likely looks for. Raises
    ConfigError: there is no such step."""
    if number is None:
        return max(steps, key=_waited_longest)
    if not 1 <= number <= len(steps):
        raise ConfigError("--step", number, f"the trace has steps 1 to {len(steps)}")
    return steps[number - 1]


def longest_waits(steps: Sequence[Step], chosen: Step, most_steps: int, most_events: int) -> list[Step]:
    """The chosen step, and with it the steps that waited longest, in their order, within the limits."""
    others = sorted((step for step in steps if step is not chosen), key=_waited_longest, reverse=True)
    drawn = [chosen, *others[: most_steps - 1]]
    sizes = accumulate(map(_num_events, drawn))
    taken = [step for step, size in zip(drawn, sizes, strict=True) if step is chosen or size <= most_events]
    return sorted(taken, key=lambda step: step.number)


def _num_events(step: Step) -> int:
    return sum(map(len, (step.waits, step.spills, step.restores, step.offloads, step.reloads, step.levels)))


def _waited_longest(step: Step) -> tuple[int, int]:
    return sum(wait.end_ns - wait.began_ns for wait in step.waits), -step.number


def records_of(events: Iterable[Event]) -> dict[tuple[int, int], int]:
    """The record of each saved tensor, by graph and index. Tensors that were never registered share a record if their
    storage was the same, alive and unchanged."""
    packs = [event for event in events if isinstance(event, Pack)]
    records = {(pack.graph, pack.index): pack.record for pack in packs if pack.record is not None}
    records |= {(event.graph, event.index): event.record for event in events if isinstance(event, Booked)}
    releases = {(event.graph, event.index): event.at_ns for event in events if isinstance(event, Release)}
    latest: dict[tuple[int, int, int], tuple[int, float]] = {}  # a storage's record, and until when it lived at least
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
    """Names of the threads that entered a scope, by thread number."""
    return {event.thread: event.thread_name for event in trace.events if isinstance(event, Scope)}


class _Events:
    """The events of a trace by kind."""

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
        waits=_waits(events.lasting(Stall, began_ns, ended_ns)),
        spills=events.lasting(Spill, began_ns, ended_ns),
        restores=events.lasting(Restore, began_ns, ended_ns),
        offloads=events.within(Offload, began_ns, ended_ns),
        reloads=events.within(Reload, began_ns, ended_ns),
        levels=sorted(events.within(Levels, began_ns, ended_ns), key=lambda level: level.at_ns),
        codecs={spill.record: spill.codec for spill in events.of(Spill)},
        memory=max((end for end in scope_ends if end.resident_bytes), key=lambda end: end.at_ns, default=None),
    )


def _waits(stalls: Iterable[Stall]) -> list[Stall]:
    waits: list[Stall] = []
    last: dict[int, int] = {}  # index of each thread's last wait
    for stall in sorted(stalls, key=lambda stall: stall.began_ns):
        before = waits[last[stall.thread]] if stall.thread in last else None
        is_same = before is not None and (before.cause, before.record) == (stall.cause, stall.record)
        if before is not None and is_same and stall.began_ns - before.end_ns < _ONE_WAIT_NS:
            end_ns = max(before.end_ns, stall.end_ns)  # rounded times may overlap
            waits[last[stall.thread]] = msgspec.structs.replace(before, end_ns=end_ns)
        else:
            last[stall.thread] = len(waits)
            waits.append(stall)
    return waits

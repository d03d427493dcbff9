"""Reads a trial's traces: how long its steps took, and the settings that it ran with."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from ..base.defaults import NUM_AT_ONCE
from ..errors import ConfigError
from ..store.trial import TracedStore
from ..tracing.events import Computed, Gone, Pack, Scope
from ..tracing.reader import RecordedTrace, read_trace
from .program import TrialFailedError
from .settings import TrialSettings

NUM_WARMUPS = 2
"""Graphs that are not counted: the first teaches the order, the second starts with the state that the first left."""

_Graph = tuple[int, int]
"""A trace of a process, and a graph of it."""


@dataclass(frozen=True)
class ProgramRecording:
    """One trial: the trace of the store with the most events, in the process with the most."""

    trace: RecordedTrace
    step_seconds: float

    @property
    def settings(self) -> TrialSettings:
        """The settings that the program ran with. ConfigError: nothing was packed, or it is a daemon's store."""
        store = self.trace.header.store
        if store.codec is None:
            raise ConfigError("COMMAND", store.place, "its store is a daemon's; only embedded stores are tuned")
        scope = self.scope
        # For the default, a trace has the distance that it results in; 0 if nothing is fetched ahead.
        is_default = scope.lookahead_bytes == store.host_bytes + store.staging_bytes or scope.prefetch == "none"
        return TrialSettings(
            store.host_bytes,
            store.staging_bytes,
            store.codec,
            scope.prefetch,
            None if is_default else scope.lookahead_bytes,
            store.io_depth or NUM_AT_ONCE,
            store.inline_bytes,
        )

    @property
    def scope(self) -> Scope:
        """The first scope in which something was packed. Raises ConfigError if there is none."""
        packing = {event.scope for event in self.trace.events if isinstance(event, Pack)}
        scopes = (event for event in self.trace.events if isinstance(event, Scope) and event.scope in packing)
        if (scope := next(scopes, None)) is None:
            raise ConfigError("COMMAND", self.trace.header.store.place, "its store received no saved tensor")
        return scope


def read_recording(folder: Path) -> ProgramRecording:
    """Read the traces that a trial has left in its folder. Blocks.

    Raises:
        TrialFailedError: the trial has traced nothing, or too few steps.
        ConfigError: a file is damaged.
    """
    found = [msgspec.json.decode(file.read_bytes(), type=TracedStore) for file in sorted(folder.glob("*-*.json"))]
    traces = []
    for each in found:
        file = folder / each.trace
        if file.exists() and b"\n" in file.read_bytes():  # else it was killed early
            traces.append((each, read_trace(file)))
    if not traces:
        raise TrialFailedError("the program entered no scope of tiered_offload within the time of a trial")
    by_process: defaultdict[int, list[RecordedTrace]] = defaultdict(list)
    for each, trace in traces:
        by_process[each.pid].append(trace)
    # Ranks do the same; a process may open a store for each step.
    pid = max(by_process, key=lambda pid: sum(len(trace.events) for trace in by_process[pid]))
    most = max(by_process[pid], key=lambda trace: len(trace.events))
    step_seconds = step_seconds_of(by_process[pid])
    if step_seconds is None:
        begun, ended = map(len, _ended_graphs(by_process[pid]))
        if not begun:
            raise TrialFailedError("nothing to tune: the store received no saved tensor (stats().summary() says why)")
        seen = f"{begun} step{'s' * (begun != 1)} seen" + f", {ended} to the end" * (ended != begun)
        why = "the program did too few steps, by itself or within the time of a trial"
        raise TrialFailedError(f"{seen}, {NUM_WARMUPS + 1} needed: {why}")
    return ProgramRecording(most, step_seconds)


def step_seconds_of(traces: Sequence[RecordedTrace]) -> float | None:
    """How long a step of one process takes, from the end of one graph to the end of the next. None: too few were
    recorded.

    A graph ends when it is gone; on an accelerator, when that has finished it, if the trace says so. Graphs of
    different sizes (two models in turn) are not mixed: each size's median is weighted by how often it comes."""
    sizes, ends = _ended_graphs(traces)
    lasted: defaultdict[int, list[float]] = defaultdict(list)
    for (before_ns, _), (at_ns, graph) in pairwise(ends[NUM_WARMUPS - 1 :]):
        lasted[sizes[graph]].append((at_ns - before_ns) / 1e9)
    num_steps = sum(map(len, lasted.values()))
    if not num_steps:
        return None
    return sum(statistics.median(each) * len(each) for each in lasted.values()) / num_steps


def _ended_graphs(traces: Sequence[RecordedTrace]) -> tuple[Counter[_Graph], list[tuple[int, _Graph]]]:
    sizes: Counter[_Graph] = Counter()
    ended: dict[_Graph, int] = {}
    for number, trace in enumerate(traces):
        for event in trace.events:
            if isinstance(event, Pack):
                sizes[number, event.graph] += event.storage_bytes
            elif isinstance(event, Gone | Computed):
                graph = number, event.graph
                ended[graph] = max(ended.get(graph, 0), event.at_ns)
    return sizes, sorted((at_ns, graph) for graph, at_ns in ended.items() if graph in sizes)

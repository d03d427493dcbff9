"""Reads a trial's traces: how long its steps took, and what the simulator needs to repeat one."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from ..base.defaults import NUM_AT_ONCE
from ..errors import ConfigError
from ..simulator import Action, Compute, Workload
from ..simulator import Pack as PackAction
from ..simulator import Unpack as UnpackAction
from ..simulator.from_trace import workload_of
from ..simulator.hardware import CALL_SECONDS_PER_RECORD
from ..store.trial import TracedStore
from ..tracing.events import Computed, Gone, Pack, Restore, Scope, Spill
from ..tracing.reader import RecordedTrace, read_trace
from ..tracing.steps import Step, steps_of
from .program import TrialFailedError
from .settings import TrialSettings

NUM_WARMUPS = 2
"""Graphs that are not counted: the first teaches the order, the second starts with the state that the first left."""

_Graph = tuple[int, int]
"""A trace of a process, and a graph of it."""


@dataclass(frozen=True)
class ProgramRecording:
    """One trial: the trace of the store with the most events, in the process with the most. `num_threads`: that torch
    computed with. `num_ranks`: processes that trained side by side."""

    trace: RecordedTrace
    num_threads: int
    num_ranks: int
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

    def workload(self) -> Workload:
        """A typical step of the largest graph, and the time between two steps. Raises ConfigError: no step was recorded
        whole."""
        every = steps_of(self.trace)
        whole = [step for step in every[NUM_WARMUPS:] if step.is_whole and step.backward_began_ns is not None]
        if not whole:
            raise ConfigError("COMMAND", self.trace.header.store.place, "none of its steps was recorded whole")
        most_bytes = max(map(_saved_bytes, whole))
        alike = [step for step in whole if _saved_bytes(step) == most_bytes]
        alike.sort(key=lambda step: step.ended_ns - step.began_ns)
        step = alike[len(alike) // 2]
        workload = workload_of(self.trace, step, training_cores=self.num_threads)
        computed = {event.graph: event for event in self.trace.events if isinstance(event, Computed)}
        told = [(each, computed[each.graph]) for each in alike if each.graph in computed]
        if told:
            return _paced(workload, told, self.step_seconds)
        gaps = [max(0, after.began_ns - before.ended_ns) / 1e9 for before, after in pairwise(every)]
        between = Compute(statistics.median(gaps) if gaps else 0.0)  # optimizer and data
        computing = max(0.0, workload.compute_seconds - _call_seconds(step))
        return replace(workload, actions=[*_lasting(workload.actions, computing), between])


def _saved_bytes(step: Step) -> int:
    return sum(pack.storage_bytes for pack in step.packs)


def _call_seconds(step: Step) -> float:
    """The time of the step's calls that is due to moved records. It is left out of compute: a simulation adds it again.
    A trace does not show this time, so the simulator's figure is used."""
    moved: list[Spill | Restore] = [*step.spills, *step.restores]
    return CALL_SECONDS_PER_RECORD * sum(step.began_ns <= each.queued_ns <= step.ended_ns for each in moved)


def _paced(workload: Workload, steps: Sequence[tuple[Step, Computed]], step_seconds: float) -> Workload:
    """The step with the accelerator's times, which the host runs ahead of: forward and backward each take as long as
    marks in the stream that computes have measured. The rest of a step's time comes at its end."""
    forward, backward = map(statistics.median, zip(*(_compute_seconds(*each) for each in steps), strict=True))
    lasted = statistics.median(each.forward_seconds + each.backward_seconds for _, each in steps)
    packs = [place for place, action in enumerate(workload.actions) if isinstance(action, PackAction)]
    unpacks = [place for place, action in enumerate(workload.actions) if isinstance(action, UnpackAction)]
    actions = [
        *_lasting(workload.actions[: packs[0]], 0.0),
        *_lasting(workload.actions[packs[0] : unpacks[0]], forward),
        *_lasting(workload.actions[unpacks[0] : unpacks[-1]], backward),
        *_lasting(workload.actions[unpacks[-1] :], 0.0),
        Compute(max(0.0, step_seconds - lasted)),
    ]
    return replace(workload, actions=actions, training_cores=1.0)


def _compute_seconds(step: Step, computed: Computed) -> tuple[float, float]:
    turned_ns = step.ended_ns if step.backward_began_ns is None else step.backward_began_ns
    waits = [(wait.began_ns < turned_ns, (wait.end_ns - wait.began_ns) / 1e9) for wait in step.waits]
    forward, backward = (sum(seconds for is_forward, seconds in waits if is_forward is way) for way in (True, False))
    return (
        max(0.0, computed.forward_seconds - computed.forward_wait_seconds - forward),
        max(0.0, computed.backward_seconds - computed.backward_wait_seconds - backward),
    )


def _lasting(actions: Sequence[Action], seconds: float) -> list[Action]:
    host_seconds = sum(action.seconds for action in actions if isinstance(action, Compute))
    pace = seconds / host_seconds if host_seconds else 0.0
    return [Compute(pace * action.seconds) if isinstance(action, Compute) else action for action in actions]


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
    num_threads = next(each.num_threads for each, _ in traces if each.pid == pid)
    step_seconds = step_seconds_of(by_process[pid])
    if step_seconds is None:
        begun, ended = map(len, _ended_graphs(by_process[pid]))
        if not begun:
            raise TrialFailedError("nothing to tune: the store received no saved tensor (stats().summary() says why)")
        seen = f"{begun} step{'s' * (begun != 1)} seen" + f", {ended} to the end" * (ended != begun)
        why = "the program did too few steps, by itself or within the time of a trial"
        raise TrialFailedError(f"{seen}, {NUM_WARMUPS + 1} needed: {why}")
    return ProgramRecording(most, num_threads, len(by_process), step_seconds)


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

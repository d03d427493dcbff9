"""A workload to simulate, from a step that was recorded.

What the store did to the step is taken out: a thread's time between two calls of the store is compute, the waits within
calls are not. What the calls themselves cost while nobody waited stays with compute, since they will be made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..tracing.events import Booked, Pack, Release, Spill, Unpack
from ..tracing.reader import RecordedTrace
from ..tracing.steps import Step, records_of
from . import workload
from .workload import Action, Saved, Workload

__all__ = ["workload_of"]


def workload_of(trace: RecordedTrace, step: Step, *, training_cores: float | None = None) -> Workload:
    """The workload of a step of a trace.

    Best is a step whose store had room for everything: its compute is training's alone, and what others hold
    throughout (the input batch) can be told. Otherwise that is spilled here, and never there. A storage that is saved
    several times is held by others until the last time; one that is saved once is taken to be the store's own as soon
    as a later node saves something, which is too soon where a variable keeps it for longer.

    Args:
        trace: whole.
        step: of it; its forward and its backward follow each other, on whichever threads.
        training_cores: that compute keeps busy; None: all of the machine that it was recorded on.

    Raises:
        ConfigError: the step was recorded only in part, or on an accelerator, which is not simulated.
    """
    if not step.is_whole or step.backward_began_ns is None:
        raise ConfigError("step", step.number, "give a step that was recorded from its forward to its end")
    devices = {pack.device for pack in step.packs} - {"cpu"}
    if devices:
        raise ConfigError("step", step.number, f"only host memory is simulated; it saved tensors on {sorted(devices)}")
    packs = sorted(step.packs, key=lambda pack: pack.index)
    if [pack.index for pack in packs] != list(range(len(packs))):
        raise ConfigError("step", step.number, "events are missing; the trace lost them")
    cores = trace.header.machine.num_cores if training_cores is None else training_cores
    saved = _saved(trace, step, packs)
    return Workload(saved, _actions(step, saved), cores)


def _saved(trace: RecordedTrace, step: Step, packs: Sequence[Pack]) -> list[Saved]:
    records = records_of(trace.events)
    shared = _shared(trace, step)
    kinds = {spill.record: spill.kind for spill in trace.events if isinstance(spill, Spill)}
    first: dict[int, int] = {}
    saved = []
    for pack in packs:
        record = records[step.graph, pack.index]
        root = first.setdefault(record, pack.index)
        kind = kinds.get(record, pack.dtype)
        saved.append(Saved(pack.storage_bytes, pack.node, None if root == pack.index else root, kind, record in shared))
    return saved


def _shared(trace: RecordedTrace, step: Step) -> set[int]:
    """The records that others hold when forward ends: where all had room, its end books them alone. Else not told."""
    if sum(pack.storage_bytes for pack in step.packs) > trace.header.store.host_bytes:
        return set()
    last_packed_ns = max(pack.end_ns for pack in step.packs)
    return {
        event.record
        for event in trace.events
        if isinstance(event, Booked) and event.graph == step.graph
        if last_packed_ns <= event.at_ns <= step.forward_ended_ns
    }


def _last_packs(saved: Sequence[Saved]) -> set[int]:
    """The last saved tensor of each storage that is saved several times: somebody held that until then."""
    last = {tensor.record: index for index, tensor in enumerate(saved) if tensor.record is not None}
    return set(last.values())


@dataclass(frozen=True)
class _Moment:
    """Something that the thread did, from `began_ns` to `ended_ns`, of which it waited `waited_ns`."""

    began_ns: int
    ended_ns: int
    waited_ns: int
    action: Action


def _actions(step: Step, saved: Sequence[Saved]) -> list[Action]:
    actions: list[Action] = []
    last_packs = _last_packs(saved)
    reached_ns = step.began_ns
    for moment in _moments(step):
        compute_ns = max(0, moment.ended_ns - max(moment.began_ns, reached_ns) - moment.waited_ns)
        compute_ns += max(0, moment.began_ns - reached_ns)
        if compute_ns:
            actions.append(workload.Compute(compute_ns / 1e9))
        actions.append(moment.action)
        if isinstance(moment.action, workload.Pack) and moment.action.saved in last_packs:
            actions.append(workload.LetGo(moment.action.saved))
        reached_ns = max(reached_ns, moment.ended_ns)
    if step.ended_ns > reached_ns:
        actions.append(workload.Compute((step.ended_ns - reached_ns) / 1e9))
    return actions


def _moments(step: Step) -> list[_Moment]:
    waits = _waits_of_threads(step)
    moments = [_moment(pack, workload.Pack(pack.index), waits) for pack in step.packs]
    moments += [_moment(unpack, workload.Unpack(unpack.index), waits) for unpack in step.unpacks]
    moments += [_at(release.at_ns, workload.Release(release.index)) for release in _last_releases(step.releases)]
    moments.append(_at(step.forward_ended_ns, workload.EndScope()))
    return sorted(moments, key=lambda moment: (moment.began_ns, moment.ended_ns))


def _at(at_ns: int, action: Action) -> _Moment:
    return _Moment(at_ns, at_ns, 0, action)


def _moment(call: Pack | Unpack, action: Action, waits: Mapping[int, Sequence[tuple[int, int]]]) -> _Moment:
    own = waits.get(call.thread, ())
    waited_ns = sum(max(0, min(end, call.end_ns) - max(began, call.began_ns)) for began, end in own)
    return _Moment(call.began_ns, call.end_ns, waited_ns, action)


def _waits_of_threads(step: Step) -> Mapping[int, Sequence[tuple[int, int]]]:
    waits: dict[int, list[tuple[int, int]]] = {}
    for wait in step.waits:
        waits.setdefault(wait.thread, []).append((wait.began_ns, wait.end_ns))
    return waits


def _last_releases(releases: Sequence[Release]) -> list[Release]:
    return list({release.index: release for release in releases}.values())

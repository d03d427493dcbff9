"""Makes a workload to simulate from a recorded step.

The store's effect on the step is taken out: a thread's time between two calls of the store is compute, waits within
calls are not. The time of the calls without waits counts as compute, since a simulated step makes the same calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from ..errors import ConfigError
from ..tracing.events import Ours, Pack, Scope, Spill, Unpack
from ..tracing.reader import RecordedTrace
from ..tracing.steps import Step, records_of
from . import workload
from .workload import Action, Saved, Workload

_HOST = "cpu"


def workload_of(trace: RecordedTrace, step: Step, *, training_cores: float | None = None) -> Workload:
    """The workload of a step of a trace, whose backward follows its forward.

    The store alone holds a storage from the moment when the trace says so, or never if it does not (the input batch).
    Accelerators are not simulated: what is saved there goes to host memory at once, but for what stays there within the
    scope's `device_bytes`. `training_cores`: that compute keeps busy; None: all of the recorded machine. Raises
    ConfigError: the step was recorded only in part."""
    if not step.is_whole or step.backward_began_ns is None:
        raise ConfigError("step", step.number, "give a step that was recorded from its forward to its end")
    packs = sorted(step.packs, key=lambda pack: pack.index)
    if [pack.index for pack in packs] != list(range(len(packs))):
        raise ConfigError("step", step.number, "events are missing; the trace lost them")
    records = records_of(trace.events)
    first: dict[int, int] = {}
    roots = [first.setdefault(records[step.graph, pack.index], pack.index) for pack in packs]
    freed, staying = _freed(step, packs, roots), _staying(trace, packs, roots)
    kinds = {spill.record: spill.kind for spill in trace.events if isinstance(spill, Spill)}
    saved = [
        Saved(
            pack.storage_bytes,
            pack.node,
            None if root == pack.index else root,
            kinds.get(records[step.graph, pack.index], pack.dtype),
            is_shared=root not in freed or root in staying,
        )
        for pack, root in zip(packs, roots, strict=True)
    ]
    cores = trace.header.machine.num_cores if training_cores is None else training_cores
    return Workload(saved, _actions(step, freed.values()), cores)


def _staying(trace: RecordedTrace, packs: Sequence[Pack], roots: Sequence[int]) -> set[int]:
    """The storages, by their first packs, that stay on an accelerator: those saved last."""
    room_bytes = max(scope.device_bytes for scope in trace.events if isinstance(scope, Scope))
    staying: set[int] = set()
    for pack, root in zip(reversed(packs), reversed(roots), strict=True):
        if pack.device != _HOST and root == pack.index:
            room_bytes -= pack.storage_bytes
            if room_bytes < 0:
                break
            staying.add(root)
    return staying


def _freed(step: Step, packs: Sequence[Pack], roots: Sequence[int]) -> Mapping[int, Ours]:
    """For each storage, by its first pack, the event that others had released it; not for storages that others kept.

    An event before the last pack of the storage does not count: somebody held the storage again until that pack."""
    last_pack_ns = {root: pack.end_ns for pack, root in zip(packs, roots, strict=True)}
    seen = sorted(step.ours, key=lambda ours: ours.at_ns)
    return {roots[ours.index]: ours for ours in seen if ours.at_ns >= last_pack_ns[roots[ours.index]]}


class _Moment(NamedTuple):
    began_ns: int
    ended_ns: int
    waited_ns: int
    action: Action


def _actions(step: Step, freed: Iterable[Ours]) -> list[Action]:
    actions: list[Action] = []
    reached_ns = step.began_ns
    for moment in _moments(step, freed):
        compute_ns = max(0, moment.ended_ns - max(moment.began_ns, reached_ns) - moment.waited_ns)
        compute_ns += max(0, moment.began_ns - reached_ns)
        if compute_ns:
            actions.append(workload.Compute(compute_ns / 1e9))
        actions.append(moment.action)
        reached_ns = max(reached_ns, moment.ended_ns)
    if step.ended_ns > reached_ns:
        actions.append(workload.Compute((step.ended_ns - reached_ns) / 1e9))
    return actions


def _moments(step: Step, freed: Iterable[Ours]) -> list[_Moment]:
    def call(event: Pack | Unpack, action: Action) -> _Moment:
        waits = [wait for wait in step.waits if wait.thread == event.thread]
        waited_ns = sum(max(0, min(w.end_ns, event.end_ns) - max(w.began_ns, event.began_ns)) for w in waits)
        return _Moment(event.began_ns, event.end_ns, waited_ns, action)

    released_ns = {release.index: release.at_ns for release in step.releases}
    instants: list[tuple[int, Action]] = [(at_ns, workload.Release(index)) for index, at_ns in released_ns.items()]
    instants += [
        (ours.at_ns, workload.LetGo(ours.index))
        for ours in freed
        if ours.at_ns < released_ns.get(ours.index, inf)  # else it was released before it was noticed
    ]
    instants.append((step.forward_ended_ns, workload.EndScope()))
    moments = [call(pack, workload.Pack(pack.index)) for pack in step.packs]
    moments += [call(unpack, workload.Unpack(unpack.index)) for unpack in step.unpacks]
    moments += [_Moment(at_ns, at_ns, 0, action) for at_ns, action in instants]
    return sorted(moments, key=lambda moment: (moment.began_ns, moment.ended_ns))

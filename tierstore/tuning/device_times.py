"""How long an accelerator computed in recorded steps. Pure.

A trace has the host's times, and the host runs ahead of its device. So in trials, marks in the stream that computes
measure how long forward and backward took there, and how much of that was waiting for copies (`Computed`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from ..simulator import Action, Compute, Pack, Unpack, Workload
from ..tracing.events import Computed
from ..tracing.steps import Step

__all__ = ["compute_seconds_of", "paced"]


def compute_seconds_of(step: Step, computed: Computed) -> tuple[float, float]:
    """Forward and backward on the accelerator, without the time in which it, or the host, waited."""
    turned_ns = step.ended_ns if step.backward_began_ns is None else step.backward_began_ns
    waits = [(wait.began_ns < turned_ns, (wait.end_ns - wait.began_ns) / 1e9) for wait in step.waits]
    forward, backward = (sum(seconds for is_forward, seconds in waits if is_forward is way) for way in (True, False))
    return (
        max(0.0, computed.forward_seconds - computed.forward_wait_seconds - forward),
        max(0.0, computed.backward_seconds - computed.backward_wait_seconds - backward),
    )


def paced(workload: Workload, steps: Sequence[tuple[Step, Computed]], step_seconds: float) -> Workload:
    """The step with the accelerator's times: those between the host's calls are scaled, so that forward and backward
    each take as long as on the accelerator. The rest of a step's time comes at its end.

    Args:
        workload: with the host's times.
        steps: recorded steps like it, at least one.
        step_seconds: from the end of one step to the end of the next.
    """
    forward, backward = map(statistics.median, zip(*(compute_seconds_of(*each) for each in steps), strict=True))
    lasted = statistics.median(each.forward_seconds + each.backward_seconds for _, each in steps)
    unpacks = [place for place, action in enumerate(workload.actions) if isinstance(action, Unpack)]
    packs = [place for place, action in enumerate(workload.actions) if isinstance(action, Pack)]
    actions = [
        *_lasting(workload.actions[: packs[0]], 0.0),
        *_lasting(workload.actions[packs[0] : unpacks[0]], forward),
        *_lasting(workload.actions[unpacks[0] : unpacks[-1]], backward),
        *_lasting(workload.actions[unpacks[-1] :], 0.0),
        Compute(max(0.0, step_seconds - lasted)),
    ]
    return replace(workload, actions=actions, training_cores=1.0)


def _lasting(actions: Sequence[Action], seconds: float) -> list[Action]:
    """The actions with the time between them scaled to so many seconds."""
    host_seconds = sum(action.seconds for action in actions if isinstance(action, Compute))
    pace = seconds / host_seconds if host_seconds else 0.0
    return [Compute(pace * action.seconds) if isinstance(action, Compute) else action for action in actions]

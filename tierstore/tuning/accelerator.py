"""How long an accelerator computed in recorded steps, and how fast copies were. Pure.

A trace has the host's times, and the host runs ahead of its device. So in trials, marks in the stream that computes
measure how long forward and backward took there, and how much of that was waiting for copies (`Computed`).

NOTE [Speed of the link]
If computing waited much for copies, and the host for nothing, the link was busy all the time. Its speed is then the
bytes copied divided by that time. Otherwise this is only a lower bound, and the speed has to be measured. A little
waiting proves nothing: where backward begins, computing waits even for a link twice as fast as the step needs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from ..hardware import AcceleratorLink
from ..simulator import Action, Compute, Link, Pack, Unpack, Workload
from ..tracing.events import Computed
from ..tracing.steps import Step

__all__ = ["CopyWay", "LinkSpeeds", "link_speeds", "paced", "ways_of"]


_AWAITED_SHARE = 0.1
_NOISE = 0.01


class CopyWay(NamedTuple):
    """Forward, or backward, of a recorded step.

    Attributes:
        seconds: time on the accelerator.
        copy_wait_seconds: the part of it in which computing waited for copies.
        host_wait_seconds: how long the host waited, for room or for bytes; meanwhile it queued nothing.
        copied_bytes: out in forward, back in backward.
    """

    seconds: float
    copy_wait_seconds: float
    host_wait_seconds: float
    copied_bytes: int

    @property
    def compute_seconds(self) -> float:
        """The time without the waits."""
        return max(0.0, self.seconds - self.copy_wait_seconds - self.host_wait_seconds)

    @property
    def link_bytes_per_second(self) -> float | None:
        """See NOTE [Speed of the link]; None: the step does not show it."""
        is_awaited = self.copy_wait_seconds > _AWAITED_SHARE * self.seconds
        is_alone = self.host_wait_seconds <= _NOISE * self.seconds
        return self.copied_bytes / self.seconds if self.copied_bytes and is_awaited and is_alone else None


def ways_of(step: Step, computed: Computed) -> tuple[CopyWay, CopyWay]:
    """Forward and backward of a whole step."""
    turned_ns = step.ended_ns if step.backward_began_ns is None else step.backward_began_ns
    forward_ns = sum(wait.end_ns - wait.began_ns for wait in step.waits if wait.began_ns < turned_ns)
    backward_ns = sum(wait.end_ns - wait.began_ns for wait in step.waits) - forward_ns
    is_ahead = step.scope is None or step.scope.prefetch != "none"  # else the link idles until backward asks
    return (
        CopyWay(computed.forward_seconds, computed.forward_wait_seconds, forward_ns / 1e9, computed.out_bytes),
        CopyWay(
            computed.backward_seconds, computed.backward_wait_seconds, backward_ns / 1e9, is_ahead * computed.in_bytes
        ),
    )


@dataclass(frozen=True)
class LinkSpeeds:
    """The speeds of one link, and where each is from.

    Attributes:
        link: as the simulator takes it.
        out_is_recorded, back_is_recorded: the speed is that of the recorded copies; else it was measured separately.
    """

    link: Link
    out_is_recorded: bool
    back_is_recorded: bool

    @property
    def is_recorded(self) -> bool:
        """Whether at least one speed is from recorded copies."""
        return self.out_is_recorded or self.back_is_recorded

    def times(self, factor: float) -> LinkSpeeds:
        """The same, with the recorded speeds multiplied by `factor`."""
        out = self.link.to_host_bytes_per_second * (factor if self.out_is_recorded else 1.0)
        back = self.link.to_device_bytes_per_second * (factor if self.back_is_recorded else 1.0)
        return replace(self, link=Link(out, back, self.link.both_bytes_per_second))

    def __str__(self) -> str:
        """The speeds in one line, for people."""
        out = _speed(self.link.to_host_bytes_per_second, is_recorded=self.out_is_recorded)
        back = _speed(self.link.to_device_bytes_per_second, is_recorded=self.back_is_recorded)
        return f"copies to the host at {out}, back at {back}"


def link_speeds(recorded: Sequence[tuple[CopyWay, CopyWay]], described: Sequence[AcceleratorLink]) -> LinkSpeeds | None:
    """The speed of each direction: from the recorded steps, else as measured. None: one direction has neither.

    Args:
        recorded: steps that are alike.
        described: links that were measured; only the first counts.
    """
    out, back = (_median_speed([step[place] for step in recorded]) for place in (0, 1))
    if described:
        first = described[0]
        link = Link(
            out or first.to_host_bytes_per_second,
            back or first.to_device_bytes_per_second,
            first.both_bytes_per_second or inf,
        )
    elif out is None or back is None:
        return None
    else:
        link = Link(out, back)
    return LinkSpeeds(link, out is not None, back is not None)


def paced(workload: Workload, recorded: Sequence[tuple[CopyWay, CopyWay]], step_seconds: float) -> Workload:
    """The step with the accelerator's times: those between the host's calls are scaled, so that forward and backward
    each take as long as on the accelerator. The rest of a step's time comes at its end.

    Args:
        workload: with the host's times.
        recorded: steps like it, at least one.
        step_seconds: from the end of one step to the end of the next.
    """
    forward, backward = (statistics.median(step[place].compute_seconds for step in recorded) for place in (0, 1))
    rest_seconds = step_seconds - statistics.median(step[0].seconds + step[1].seconds for step in recorded)
    unpacks = [place for place, action in enumerate(workload.actions) if isinstance(action, Unpack)]
    packs = [place for place, action in enumerate(workload.actions) if isinstance(action, Pack)]
    actions = [
        *_without_compute(workload.actions[: packs[0]]),
        *_lasting(workload.actions[packs[0] : unpacks[0]], forward),
        *_lasting(workload.actions[unpacks[0] : unpacks[-1]], backward),
        *_without_compute(workload.actions[unpacks[-1] :]),
        Compute(max(0.0, rest_seconds)),
    ]
    return replace(workload, actions=actions, training_cores=1.0)


def _lasting(actions: Sequence[Action], seconds: float) -> list[Action]:
    host_seconds = sum(action.seconds for action in actions if isinstance(action, Compute))
    pace = seconds / host_seconds if host_seconds else 0.0
    return [Compute(pace * action.seconds) if isinstance(action, Compute) else action for action in actions]


def _without_compute(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Compute)]


def _median_speed(ways: Sequence[CopyWay]) -> float | None:
    """The median speed of the link; None: most steps do not show it."""
    speeds = [speed for way in ways if (speed := way.link_bytes_per_second) is not None]
    return statistics.median(speeds) if len(speeds) > len(ways) / 2 else None


def _speed(bytes_per_second: float, *, is_recorded: bool) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s ({'as recorded' if is_recorded else 'measured alone'})"

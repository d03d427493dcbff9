"""Compares the steps of a training with what was predicted, and decides again where they differ."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import Variable

from ..base.config import format_bytes
from ..errors import TierStoreWarning
from ..hooks.in_place import Around
from ..residency.torch_names import tree_leaves
from ..returning.advice import stacklevel_of_user
from ..store.tier_store import TierStore
from .applied import PlannedCalls
from .choice import PEAK_MISS, TIME_MISS, Corrected
from .decision import Decision
from .meter import Meter
from .steps import MeasuredStep

__all__ = ["Expected", "StepWatch"]

T = TypeVar("T")

_NUM_WATCHED = 3
"""Steps measured after each decision, beside the first one, in which the store still learns its order."""
_MOST_CORRECTIONS = 3
_EVERY = 50
"""Later, one step in so many is measured."""


class Expected(NamedTuple):
    """What a plan has promised.

    Attributes:
        limit_bytes: for the peak.
        peak_bytes, step_seconds: as predicted.
        decision: what is done; None: the plan came from a file.
        reserve_bytes: part of `peak_bytes` that the decision knows nothing of, such as the state of an optimizer.
    """

    limit_bytes: int
    peak_bytes: int
    step_seconds: float
    decision: Decision | None
    reserve_bytes: int = 0


class StepWatch:
    """Measures steps of a model to which a plan is applied.

    A step lasts from the model's call, or from `run`, to the end of the backward of what that computes.

    Args:
        expected: what the plan has promised.
        calls: what the calls of each block go through; their actions change when it is decided again.
        meter: of the tier that is limited.
        store: is told of what was measured; None: nothing is stored.
        corrected: decides again; None: it cannot be.
    """

    def __init__(
        self,
        expected: Expected,
        calls: dict[str, PlannedCalls],
        meter: Meter,
        store: TierStore | None,
        corrected: Corrected | None,
    ) -> None:
        self._expected, self._calls, self._meter = expected, calls, meter
        self._store, self._corrected = store, corrected
        self._num_steps = 0
        self._num_corrections = 0
        self._has_warned = False
        self._measured: list[MeasuredStep] = []
        self._began: float | None = None
        self._is_inside = False
        self._tell(None)

    def around(self, through: Around | None) -> Around:
        """What the model's own calls go through; `through`: what they would go through without this."""
        return _WatchedCalls(self, through)

    def end(self) -> None:
        """The plan is removed."""
        if self._store is not None:
            self._store.plans.tell(self, {})
            self._store.plans.keep_within(self, None, None)

    def run(self, compute: Callable[[], T]) -> T:
        """Compute what backward begins from: a step, unless it is part of one, or has no gradients."""
        if self._is_inside or not torch.is_grad_enabled():
            return compute()
        self._correct()
        self._num_steps += 1
        is_measured = 1 < self._num_steps <= 1 + _NUM_WATCHED or self._num_steps % _EVERY == 0
        self._began = time.perf_counter() if is_measured else None
        if is_measured:
            self._meter.reset()
        self._is_inside = True
        try:
            result = compute()
        finally:
            self._is_inside = False
        if is_measured:
            self._watch_backward(result)
        return result

    def _watch_backward(self, result: object) -> None:
        """Have `_end_step` called when the backward of the result is done."""
        is_queued = False

        def queue(_: object) -> None:
            nonlocal is_queued
            if not is_queued:
                is_queued = True
                Variable._execution_engine.queue_callback(self._end_step)

        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(queue)  # type: ignore[no-untyped-call]

    def _end_step(self) -> None:
        if self._began is not None:
            peak_bytes = self._meter.peak()  # waits for the device
            self._measured.append(MeasuredStep(time.perf_counter() - self._began, peak_bytes))
            self._began = None
            self._tell(self._measured[-1])

    def _correct(self) -> None:
        """Decide again if the steps measured since the last decision have missed the prediction."""
        corrected, decision = self._corrected, self._expected.decision
        if corrected is None or decision is None or len(self._measured) < _NUM_WATCHED:
            return
        peak_bytes = max(measured.peak_bytes for measured in self._measured)
        seconds = sorted(measured.seconds for measured in self._measured)[len(self._measured) // 2]
        self._measured.clear()
        measured, expected = MeasuredStep(seconds, peak_bytes), self._expected
        has_missed = (
            abs(peak_bytes / expected.peak_bytes - 1) > PEAK_MISS
            or abs(seconds / expected.step_seconds - 1) > TIME_MISS
        )
        if not has_missed or self._num_corrections >= _MOST_CORRECTIONS:
            return
        self._num_corrections += 1
        corrected.learn(decision, MeasuredStep(seconds, peak_bytes - expected.reserve_bytes))
        again = corrected.decide()
        if again is None and peak_bytes > expected.limit_bytes and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a step took {format_bytes(peak_bytes)}, more than the limit of {format_bytes(expected.limit_bytes)}, "
                "and the memory plan has no decision that takes less",
                TierStoreWarning,
                stacklevel=stacklevel_of_user(),
            )
        if again is None or (again.step_seconds > (1 - TIME_MISS) * seconds and peak_bytes <= expected.limit_bytes):
            again = decision  # nothing is gained by a change: only what is expected was wrong
        if again.chosen != decision.chosen:
            for name, option in again.chosen.items():
                self._calls[name].action = option.action
            if self._store is not None and self._meter.is_of_host:
                self._store.plans.keep_within(self, expected.limit_bytes, 0)
            self._num_steps, seconds = 0, again.step_seconds
            # Its allocators will keep as much beside what is alive as they did before.
            peak_bytes = min(peak_bytes + again.peak_bytes - decision.peak_bytes, expected.limit_bytes)
        self._expected = expected._replace(peak_bytes=peak_bytes, step_seconds=seconds, decision=again)
        self._tell(measured)

    def _tell(self, measured: MeasuredStep | None) -> None:
        if self._store is None:
            return
        expected = self._expected
        figures = {
            "limit_bytes": expected.limit_bytes,
            "predicted_peak_bytes": expected.peak_bytes,
            "predicted_step_seconds": expected.step_seconds,
            "num_corrections": self._num_corrections,
        }
        if measured is not None:
            figures |= {"measured_peak_bytes": measured.peak_bytes, "measured_step_seconds": measured.seconds}
        self._store.plans.tell(self, figures)


class _WatchedCalls:
    """The model's own calls. An `Around`."""

    def __init__(self, watch: StepWatch, through: Around | None) -> None:
        self._watch, self._through = watch, through

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """In a pickled module there is None in its place."""
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, object]) -> Around | None:
        """A copy of the model follows the plan, but is not watched."""
        return self._through

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Around`."""
        through = self._through
        return self._watch.run(lambda: call(*args, **kwargs) if through is None else through.run(call, args, kwargs))

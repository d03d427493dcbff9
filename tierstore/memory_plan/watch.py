"""Compares the steps of a training with what was predicted, and decides again where they differ."""

from __future__ import annotations

import statistics
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from ..base.config import format_bytes
from ..errors import TierStoreWarning
from ..hooks.in_place import Around
from ..residency.torch_names import current_backward, tree_leaves
from ..returning.advice import stacklevel_of_user
from ..store.tier_store import TierStore
from .applied import PlannedCalls
from .choice import Corrected
from .decision import Decision
from .meter import Meter
from .steps import MeasuredStep

T = TypeVar("T")

_NUM_WATCHED = 3
"""Steps measured after each decision, beside the first one, in which the store still learns its order."""
_MOST_CORRECTIONS = 3
_PEAK_MISS, _TIME_MISS = 0.03, 0.05
"""Misses of a prediction by more than these shares are corrected."""
_EVERY = 50
"""Later, one step in so many is measured."""


class Expected(NamedTuple):
    """What a plan has promised. `decision`: what is done; None: the plan came from a file.

    `reserve_bytes`: part of `peak_bytes` that the decision knows nothing of, such as the state of an optimizer.
    `num_calls`: how often a step calls the model.
    """

    limit_bytes: int
    peak_bytes: int
    step_seconds: float
    decision: Decision | None
    reserve_bytes: int = 0
    num_calls: int = 1


class StepWatch:
    """Measures steps of a model to which a plan is applied. `corrected` decides again; None: it cannot be.

    A step begins with the first forward after a backward. It lasts to the end of its last backward, which is known when
    the next forward begins. Steps that call the model more or less often than the planned one are not compared: those
    of an evaluation with gradients, or of another loss. Nor are those whose result has no tensor to wait for.
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
        self._now: _Running | None = None
        self._is_inside = False
        self._tell(None)

    def around(self, through: Around | None) -> Around:
        return _WatchedCalls(self, through)

    def end(self) -> None:
        self._drop()
        if self._store is not None:
            self._store.plans.tell(self, {})
            self._store.plans.keep_within(self, None, None)

    def run(self, compute: Callable[[], T], *, num_calls: int | None = None) -> T:
        """Compute what backward begins from: a step or a part of one. Without gradients it is neither.

        `num_calls`: how many calls of the model it counts for; None: for all of a step.
        """
        if self._is_inside or not torch.is_grad_enabled():
            return compute()
        most = self._expected.num_calls
        if self._now is None or self._now.has_ended:
            self._begin()
        self._is_inside = True
        try:
            result = compute()
        except BaseException:
            self._drop()
            raise
        finally:
            self._is_inside = False
        if self._now is not None:
            self._now.num_calls += most if num_calls is None else num_calls
            if self._now.num_calls > most:
                self._now.stop()  # calls without backward may be many: the last one is enough to see the end
            self._now.watch_backward(result)
        return result

    def _begin(self) -> None:
        now = self._now
        if now is not None and now.measured is not None and now.num_calls == self._expected.num_calls:
            self._measured.append(now.measured)
            self._tell(now.measured)
        self._drop()
        self._correct()
        self._num_steps += 1
        is_measured = 1 < self._num_steps <= 1 + _NUM_WATCHED or self._num_steps % _EVERY == 0
        self._now = _Running(self._meter if is_measured and self._meter.can_reset else None)

    def _drop(self) -> None:
        now, self._now = self._now, None
        if now is not None:
            now.stop()

    def _correct(self) -> None:
        """Tell if the steps measured since the last decision have missed the prediction; decide again if they exceed
        the limit."""
        corrected, expected, decision = self._corrected, self._expected, self._expected.decision
        if corrected is None or decision is None or len(self._measured) < _NUM_WATCHED:
            return
        peak_bytes = max(measured.peak_bytes for measured in self._measured)
        seconds = statistics.median_low(measured.seconds for measured in self._measured)
        self._measured.clear()
        is_missed = (
            abs(seconds / expected.step_seconds - 1) > _TIME_MISS
            or abs(peak_bytes / expected.peak_bytes - 1) > _PEAK_MISS
        )
        if not is_missed or self._num_corrections >= _MOST_CORRECTIONS:
            return
        self._num_corrections += 1
        again: Decision | None = decision
        if peak_bytes > expected.limit_bytes:
            corrected.learn_peak(decision, MeasuredStep(seconds, peak_bytes - expected.reserve_bytes))
            again = corrected.decide()
            if again is None:
                self._warn(peak_bytes)
        if again is not None and not again.does_the_same(decision):
            for name, option in again.chosen.items():
                self._calls[name].action = option.action
            if self._store is not None and self._meter.is_of_host:
                self._store.plans.keep_within(self, expected.limit_bytes, 0, again.staging_bytes)
            self._num_steps, seconds = 0, again.step_seconds
            peak_bytes = min(again.peak_bytes + corrected.offset_bytes + expected.reserve_bytes, expected.limit_bytes)
        self._expected = expected._replace(
            peak_bytes=peak_bytes, step_seconds=seconds, decision=decision if again is None else again
        )
        self._tell(MeasuredStep(seconds, peak_bytes))

    def _warn(self, peak_bytes: int) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        limit = format_bytes(self._expected.limit_bytes)
        warnings.warn(
            f"a step took {format_bytes(peak_bytes)}, more than the limit of {limit}, "
            "and the memory plan has no decision that takes less",
            TierStoreWarning,
            stacklevel=stacklevel_of_user(),
        )

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


class _Running:
    _last: ClassVar[weakref.ref[_Running] | None] = None
    """Who has reset the peak last. Meters of one process share it, so what an earlier step measures says nothing."""

    def __init__(self, meter: Meter | None) -> None:
        self.num_calls = 0
        self.has_ended = False
        self.measured: MeasuredStep | None = None
        self._meter = meter
        self._hooks: list[RemovableHandle] = []
        self._backward = -1
        if meter is not None:
            _Running._last = weakref.ref(self)
            meter.reset()
        self._began = time.perf_counter()

    def watch_backward(self, result: object) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                self._hooks.append(leaf.register_hook(self._queue))  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _queue(self, _: object) -> None:
        """Is called for each result in each backward; has `_end` called once at the end of that backward."""
        if self._backward != (backward := current_backward()):
            self._backward = backward
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.has_ended = True
        if self._meter is not None and _Running._last is not None and _Running._last() is self:
            peak_bytes = self._meter.peak()  # waits for the device
            self.measured = MeasuredStep(time.perf_counter() - self._began, peak_bytes)


class _WatchedCalls:
    def __init__(self, watch: StepWatch, through: Around | None) -> None:
        self._watch, self._through = watch, through

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, object]) -> Around | None:
        """A copy of the model follows the plan, but is not watched."""
        return self._through

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        through = self._through

        def compute() -> Any:
            return call(*args, **kwargs) if through is None else through.run(call, args, kwargs)

        return self._watch.run(compute, num_calls=1)

"""Measures the steps of a training under a plan."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from ..base.caller import stacklevel_of_user
from ..base.config import format_bytes
from ..errors import TierStoreWarning
from ..hooks.in_place import Around
from ..store.tier_store import TierStore
from ..tensors.torch_names import current_backward
from .contents import Contents
from .meter import Meter
from .steps import MeasuredStep, hooks_on

T = TypeVar("T")

_NUM_WATCHED = 3
"""Steps measured at first, beside the very first one, in which the store still learns its order."""
_EVERY = 50
"""Later, one step in so many is measured."""


class StepWatch:
    """Measures steps of a model to which a plan is applied, tells the store, and warns if one exceeds the limit.

    A step begins with the first forward after a backward. It lasts to the end of its last backward, which is known when
    the next forward begins. Steps that call the model more or less often than the planned one do not count: those of an
    evaluation with gradients, or of another loss. Nor do those whose result has no tensor to wait for."""

    def __init__(self, contents: Contents, meter: Meter, store: TierStore | None) -> None:
        self._contents, self._meter, self._store = contents, meter, store
        self._num_steps = 0
        self._has_warned = self._is_inside = False
        self._peaks: list[int] = []  # of measured steps, since the limit was compared
        self._now: _Running | None = None
        self._tell({})

    def around(self, through: Around | None) -> Around:
        return _WatchedCalls(self, through)

    def end(self) -> None:
        self._drop()
        if self._store is not None:
            self._store._core.plans.tell(self, {})
            self._store._core.plans.keep_within(self, None, None)

    def run(self, compute: Callable[[], T], *, num_calls: int | None = None) -> T:
        """Compute what backward begins from: a step, or a part of one that counts for `num_calls` of the model. Without
        gradients it is neither."""
        if self._is_inside or not torch.is_grad_enabled():
            return compute()
        most = self._contents.num_calls
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
        if now is not None and now.measured is not None and now.num_calls == self._contents.num_calls:
            self._note(now.measured)
        self._drop()
        self._num_steps += 1
        is_measured = 1 < self._num_steps <= 1 + _NUM_WATCHED or self._num_steps % _EVERY == 0
        self._now = _Running(self._meter if is_measured and self._meter.can_reset else None)

    def _drop(self) -> None:
        now, self._now = self._now, None
        if now is not None:
            now.stop()

    def _note(self, measured: MeasuredStep) -> None:
        self._tell({"measured_peak_bytes": measured.peak_bytes, "measured_step_seconds": measured.seconds})
        limit_bytes = self._contents.limit_bytes
        self._peaks.append(measured.peak_bytes)
        if len(self._peaks) < _NUM_WATCHED:
            return
        most_bytes = max(self._peaks)
        self._peaks.clear()
        if most_bytes > limit_bytes and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a step took {format_bytes(most_bytes)}, more than the memory plan's limit of "
                f"{format_bytes(limit_bytes)}: plan again, with `reserve` for what the program takes beside the model",
                TierStoreWarning,
                stacklevel=stacklevel_of_user(),
            )

    def _tell(self, measured: dict[str, float]) -> None:
        if self._store is not None:
            predicted = self._contents.predicted
            figures = {
                "limit_bytes": self._contents.limit_bytes,
                "predicted_peak_bytes": predicted.peak_bytes,
                "predicted_step_seconds": predicted.step_seconds,
            }
            self._store._core.plans.tell(self, figures | measured)


class _Running:
    """A step. Meters of one process share the peak, so what another step has measured since `_last` says nothing."""

    _last: ClassVar[weakref.ref[_Running] | None] = None

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
        self._hooks += hooks_on(result, self._queue)

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
    """Calls of the model. A copy of it follows the plan (`through`), but is not watched."""

    def __init__(self, watch: StepWatch, through: Around | None) -> None:
        self._watch, self._through = watch, through

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, object]) -> Around | None:
        return self._through

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        through = self._through
        if through is None:
            return self._watch.run(lambda: call(*args, **kwargs), num_calls=1)
        return self._watch.run(lambda: through.run(call, args, kwargs), num_calls=1)

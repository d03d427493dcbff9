"""What each way costs, found out by eight real steps. The model may not fit as it is, so they take little memory:

1. everything is stored: shows which modules are the blocks;
2. forward alone, each block twice: its operators, what it saves, and whether it gives the same bits again;
3. everything is stored; then every block is computed again and its inputs are stored: the memory of each moment;
4. the latter, twice, undisturbed: how long it takes to compute each block again;
5. everything is stored, twice: what the store's work costs.

The first two end before an operator that takes more than the limit. What follows is done only if the steps before show
that it fits. A block that could not be computed again within the limit, whatever else is done, is not."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigError
from ..hooks.in_place import Around
from ..hooks.module import ModuleScope
from ..hooks.offload import PrefetchOrder, tiered_offload
from ..store.tier_store import TierStore
from .applied import PlannedCalls
from .call_tree import CallTree, Storages, blocks_of, union
from .decision import NARROW_BYTES, Action, BlockPlan, Decision, Moment, Prices, StepCosts, options_of, with_margin
from .meter import LimitReachedError, MemoryGuard, Meter
from .recording import TOO_LARGE, BlockRecording, RecordedCall
from .steps import MeasuredStep, Steps, StepTimeline, check_is_plain

_STORE, _CHECKPOINT, _RECOMPUTE = Action("store"), Action("recompute"), Action("recompute", stores=True)
_MIN_BYTES = (2**20, 2**18, 2**16, 2**14)
_MOST_SMALL = 0.03
"""The share of all saved bytes that may stay because they are in small tensors."""
_SCRATCH_BYTES = 16 * 2**20
_USUAL_SECONDS, _LEAST_SECONDS = 0.4 / 2**30, 0.05 / 2**30
"""What a byte in the store costs if that cannot be measured, and the least that is believed: it takes CPU time."""
_LEAST_DIFFERENCE = 0.2
"""Two steps tell what the store costs if they differ by this share of the bytes."""
_LEAST_PLAIN, _LEAST_UNCHECKPOINTED = 0.05, 0.5
"""The shares of a measured step that are believed to be left without what it stores, and without what it computes again
(forward alone, at most). Any step may be longer than another on a busy machine, so a difference of two may be
anything."""

Calls = Mapping[str, Sequence[RecordedCall]]


class TriedDecision(NamedTuple):
    """A decision, and what its trial measured."""

    decision: Decision
    measured: MeasuredStep

    @classmethod
    def untried(cls, decision: Decision) -> Self:
        return cls(decision, MeasuredStep(decision.step_seconds, decision.peak_bytes))


class Trials:
    """Takes steps with actions applied, within `limit_bytes` of the tier that `meter` measures. `again_seconds`: how
    long the last step has computed each block again."""

    def __init__(
        self, model: nn.Module, run: Callable[[], torch.Tensor], store: TierStore, meter: Meter, limit_bytes: int
    ) -> None:
        self.model, self.store, self.meter, self.limit_bytes = model, store, meter, limit_bytes
        self.steps = Steps(model, run, meter)
        self.guards_memory = meter.is_of_host and not are_several()  # ranks have to take the same number of steps
        self.bytes_of_store = store.staging_bytes + _SCRATCH_BYTES
        self.spared_bytes = max(0, store.staging_bytes - NARROW_BYTES) if meter.is_of_host else 0
        self.blocks: Mapping[str, BlockPlan] = {}
        self.min_bytes = 1
        self.again_seconds: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._limit_store(NARROW_BYTES)
        return self

    def __exit__(self, *_: object) -> None:
        self.store._core.plans.keep_within(self, None, None)

    def _limit_store(self, staging_bytes: int | None) -> None:
        """Have the store return memory before the limit, and keep nothing there but what moves."""
        if self.meter.is_of_host:
            self.store._core.plans.keep_within(self, self.limit_bytes, 0, staging_bytes)

    def tidy(self) -> None:
        """Wait until what is stored has left memory, and return what is free. Steps that follow find pinned memory, as
        those of a training do but for the first."""
        self.store.flush()
        self.store._core.residency.slab.wait_until_pinned()
        self.meter.tidy()

    def look(self, around: Mapping[str, Around], select: Callable[[torch.Tensor], bool], *, has_backward: bool) -> None:
        """A step in which everything is stored, and no operator runs that would take more than the limit."""
        scope = tiered_offload(self.store, min_bytes=1, select=select)
        with MemoryGuard(self.meter, self.limit_bytes, self.tidy) if self.guards_memory else nullcontext():
            self.steps.take(around, scope=scope, has_backward=has_backward)

    def timeline(self, actions: Mapping[str, Action]) -> StepTimeline:
        """A step in which only what is alive is counted at each moment: nothing is read before it is asked for."""
        slab = self.store._core.residency.slab
        timeline = StepTimeline(self.meter, self.tidy, lambda: slab.mapped_bytes if self.meter.is_of_host else 0)
        around = {name: timeline.around(name, calls) for name, calls in self._calls_of(actions, "none").items()}
        self.tidy()
        with timeline:
            self.steps.take(around)
        return timeline

    def take(self, decision: Decision, num_steps: int) -> MeasuredStep:
        """Some steps: the median of all but the first, in which the store learns its order, and their peak."""
        self._limit_store(decision.staging_bytes)
        self.tidy()
        returned_before = self._returned_bytes()
        steps = []
        calls = self._calls_of(decision.actions, "learned")
        for _ in range(num_steps):
            for each in calls.values():
                each.recompute_seconds = 0.0
            steps.append(self.steps.take(calls))
        self.again_seconds = {name: each.recompute_seconds for name, each in calls.items()}
        return MeasuredStep(
            statistics.median(step.seconds for step in steps[1:]),
            max(step.peak_bytes for step in steps),
            self._returned_bytes() - returned_before,
        )

    def _calls_of(self, actions: Mapping[str, Action], prefetch: PrefetchOrder) -> dict[str, PlannedCalls]:
        scope = ModuleScope(self.store, min_bytes=self.min_bytes, prefetch=prefetch)
        return {
            name: PlannedCalls(action, self.blocks[name], scope if action.uses_store else None)
            for name, action in actions.items()
        }

    def _returned_bytes(self) -> int:
        return self.store.stats().returned_bytes if self.meter.is_of_host else 0


def are_several() -> bool:
    """Whether `torch.distributed` is in use: this process may be one rank of several."""
    return dist.is_available() and dist.is_initialized()


def measure_prices(trials: Trials) -> tuple[Prices, list[TriedDecision]]:
    """Find out the prices, within the limit. Also returns the decisions that were measured on the way.

    Raises:
        ConfigError: no block saves anything that could be moved, or something is around the model's calls already; or
            blocks exchange data between ranks.
        LimitReachedError: it takes more than the limit.
    """
    model = trials.model
    for name, module in model.named_modules():
        check_is_plain(name, module)
    tree = CallTree(model, Storages(model))
    trials.look(tree.around, tree.saw, has_backward=True)
    names = blocks_of(tree.saved)
    if not names:
        raise ConfigError("model", type(model).__name__, "its modules save no tensors that could be moved")
    recording = BlockRecording(Storages(model), trials.tidy)
    trials.look({name: recording.around(name) for name in names}, recording.saw, has_backward=False)
    recording.end()
    if recording.communicates and are_several() and dist.get_world_size() > 1:
        what = "its blocks exchange data between ranks, as under FSDP2: ranks that decide alone would wait for others"
        raise ConfigError("model", type(model).__name__, what)
    calls = {name: several for name in names if (several := [call for call in recording.calls if call.name == name])}
    trials.min_bytes = _min_bytes(recording)
    trials.blocks = {name: _block(name, model, several) for name, several in calls.items()}
    moments = _moments(trials, calls)
    prices = Prices(
        {},
        moments,
        StepCosts(0.0, 0.0, trials.bytes_of_store),
        trials.spared_bytes,
        {name: _block(name, model, several) for name, several in calls.items()},
        trials.min_bytes,
        max(1, tree.num_calls),
    )
    return _with_times(trials, prices, calls, recording.rest.keys())


def _block(name: str, model: nn.Module, calls: Sequence[RecordedCall]) -> BlockPlan:
    return BlockPlan(
        name,
        type(model.get_submodule(name)).__name__,
        buffers=tuple(sorted({buffer for call in calls for buffer in call.buffers})),
        evaluates=tuple(calls[0].evaluates),
        differs=next((call.differs for call in calls if call.differs), ""),
    )


def _with_times(
    trials: Trials, prices: Prices, calls: Calls, rest: Collection[int]
) -> tuple[Prices, list[TriedDecision]]:
    """Add the times, and the options, whose order depends on them. A strategy that does not fit is not measured.
    Storages in `rest` are kept outside of blocks."""

    def with_options(again_seconds: Mapping[str, float]) -> Prices:
        options = {
            name: options_of(several, again_seconds[name], prices.min_bytes, rest) for name, several in calls.items()
        }
        return prices._replace(options=options)

    again_seconds = {name: sum(call.seconds for call in several) for name, several in calls.items()}
    untimed = with_options(again_seconds)
    least = untimed.narrow().decide(None)
    if trials.guards_memory and least is not None and with_margin(least.peak_bytes) > trials.limit_bytes:
        raise LimitReachedError(least.peak_bytes)
    # In host memory, what is computed again competes with the store for cores, and its price is to tell that.
    ways = (_RECOMPUTE,) if trials.meter.is_of_host else (_CHECKPOINT, _RECOMPUTE)
    recomputed = _first_that_fits(trials, untimed, *ways)
    measured_seconds = again_seconds if recomputed is None else trials.again_seconds
    stored = _first_that_fits(trials, untimed, _STORE)
    # A block that was not computed again, or in no time, keeps the price of its forward.
    timed = with_options(again_seconds | {name: seconds for name, seconds in measured_seconds.items() if seconds > 0})
    costs = costs_of(timed.costs, stored, recomputed, sum(measured_seconds.values()))
    return timed._replace(costs=costs), [each for each in (recomputed, stored) if each is not None]


def _first_that_fits(trials: Trials, prices: Prices, *actions: Action) -> TriedDecision | None:
    """Tries one of the strategies, of which the last needs least memory. None: even that would be killed."""
    ways = [each.uniform(action) for action in actions for each in (prices, prices.narrow())]
    fitting = [decision for decision in ways if with_margin(decision.peak_bytes) <= trials.limit_bytes]
    if not fitting and trials.guards_memory:
        return None
    decision = (fitting or ways[-1:])[0]
    return TriedDecision(decision, trials.take(decision, 2))


def costs_of(
    costs: StepCosts, stored: TriedDecision | None, recomputed: TriedDecision | None, again_seconds: float
) -> StepCosts:
    """What a plain step and a byte in the store cost, by what was measured. `again_seconds`: that `recomputed` has
    computed again."""
    per_byte, plain_seconds = _USUAL_SECONDS, 0.0
    if recomputed is not None:
        seconds = recomputed.measured.seconds
        plain_seconds = max(seconds - again_seconds, _LEAST_UNCHECKPOINTED * seconds)
    if stored is not None and recomputed is not None:
        more_bytes = stored.decision.stored_bytes - recomputed.decision.stored_bytes
        if more_bytes > _LEAST_DIFFERENCE * stored.decision.stored_bytes:
            most = (1 - _LEAST_PLAIN) * stored.measured.seconds / stored.decision.stored_bytes
            per_byte = max(min((stored.measured.seconds - plain_seconds) / more_bytes, most), _LEAST_SECONDS)
    known = stored or recomputed
    if known is None:
        return replace(costs, step_seconds=3 * again_seconds, store_seconds=per_byte)  # backward takes twice as long
    seconds = stored.measured.seconds if stored is not None else plain_seconds
    step_seconds = max(seconds - per_byte * known.decision.stored_bytes, _LEAST_PLAIN * seconds)
    return replace(costs, step_seconds=step_seconds, store_seconds=per_byte)


def _min_bytes(recording: BlockRecording) -> int:
    """The largest limit under which little stays for being small."""
    sizes = union(call.saved for call in recording.calls).values()
    for min_bytes in _MIN_BYTES:
        if sum(nbytes for nbytes in sizes if nbytes < min_bytes) <= _MOST_SMALL * sum(sizes):
            break
    return min_bytes


def _moments(trials: Trials, calls: Calls) -> list[Moment]:
    """Measured with all stored, and with all computed again. From then on `calls` says which blocks are too large for
    that."""
    stored = trials.timeline(dict.fromkeys(calls, _STORE))
    saved_bytes = {name: max(sum(call.saved.values()) for call in several) for name, several in calls.items()}
    _refuse_large(calls, stored, saved_bytes, trials.limit_bytes)
    recomputed = trials.timeline(
        {name: _STORE if any(call.differs for call in several) else _RECOMPUTE for name, several in calls.items()}
    )
    inputs_bytes = sum(union(call.inputs for several in calls.values() for call in several).values())
    least_bytes = min(inputs_bytes, trials.bytes_of_store - trials.spared_bytes)  # they stay, or go to the store
    _refuse_large(calls, recomputed, dict.fromkeys(calls, least_bytes), trials.limit_bytes)
    names = recomputed.names
    moments = [Moment(recomputed.first_bytes, frozenset())]
    for number, name in enumerate(names):
        holders = frozenset(names[: number + 1])
        moments.append(Moment(recomputed.forward_bytes[number], holders, name, stored.forward_bytes[number]))
    for place, number in enumerate(recomputed.order):
        holders = frozenset(name for other, name in enumerate(names) if other not in recomputed.order[: place + 1])
        stored_bytes = stored.backward_bytes.get(number, recomputed.backward_bytes[number])
        moments.append(Moment(recomputed.backward_bytes[number], holders, names[number], stored_bytes))
    return moments


def _refuse_large(calls: Calls, timeline: StepTimeline, more_bytes: Mapping[str, int], limit_bytes: int) -> None:
    """Say of blocks that they are too large. `more_bytes`: memory that they take in backward beside what was seen."""
    for number, seen_bytes in timeline.backward_bytes.items():
        name = timeline.names[number]
        for call in calls[name] if seen_bytes + more_bytes[name] > limit_bytes else ():
            call.differs = call.differs or TOO_LARGE

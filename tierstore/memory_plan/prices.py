"""What each way costs, found out by a few real steps.

The steps, in their order, each within little memory, since the model may not fit as it is:

1. everything is stored: shows which modules are the blocks;
2. forward alone, each block twice: its operators, what it saves, and whether it gives the same bits again;
3. everything is stored; then every block is computed again and its inputs are stored: the memory of each moment;
4. the latter, undisturbed: how long it takes to compute each block again;
5. everything is stored: what the store's work costs;
6. if all of it fits: everything is kept.

A block that could not be computed again within the limit, whatever else is done, is not: a step that tried would be
killed where the system enforces the limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import nn

from ..errors import ConfigError
from ..hooks.in_place import Around, around_calls_of
from ..hooks.module import ModuleScope
from ..hooks.offload import tiered_offload
from ..store.tier_store import TierStore
from .applied import BlockTraits, PlannedCalls
from .blocks import blocks_of
from .call_tree import CallTree, Storages
from .decision import NARROW_BYTES, Decision, Moment, StepCosts, decision_of
from .menu import Action, Option, options_of
from .meter import Meter
from .ranks import are_several, share_differences
from .recording import BlockRecorder, BlockRecording, RecordedCall
from .steps import MeasuredStep, Steps, StepTimeline

__all__ = ["Prices", "Trials", "measure_prices"]

_MIB = 2**20
_MIN_BYTES = (_MIB, 2**18, 2**16, 2**14)
_MOST_SMALL = 0.03
"""The share of all saved bytes that may stay because they are in small tensors."""
_SCRATCH_BYTES = 16 * _MIB
_USUAL_SECONDS, _LEAST_SECONDS = 0.4 / 2**30, 0.05 / 2**30
"""What a byte in the store costs if that cannot be measured, and the least that is believed: it takes CPU time."""
_TOO_LARGE = "that takes more memory than the limit"
_LEAST_DIFFERENCE = 0.2
"""Two steps tell what the store costs if they differ by this share of the bytes."""
_NUM_STEPS, _MOST_STEPS = 4, 8
"""Of a trial."""
_NUM_TURNS = 3
_STILL_RISES = 0.01
"""A peak that is above all before it by this share has not settled: heaps get more holes with each step."""


class Prices(NamedTuple):
    """All that a decision needs to know, but the limit.

    Attributes:
        options: of each block.
        moments: of a step.
        costs: of a step.
        kinds: the class of each block's module.
        traits: of each block.
        differs: of blocks that are not computed again: why.
        min_bytes: smaller tensors are not stored.
        num_calls: how often a step calls the model.
        communicates: a block exchanges data with other processes.
    """

    options: dict[str, list[Option]]
    moments: list[Moment]
    costs: StepCosts
    kinds: dict[str, str]
    traits: Mapping[str, BlockTraits]
    differs: dict[str, str]
    min_bytes: int
    num_calls: int
    communicates: bool

    def decision_for(self, actions: Mapping[str, Action], *, is_narrow: bool = False) -> Decision | None:
        """The decision for an action of each block; None: a block does not have it. `is_narrow`: as `decide`'s."""
        chosen = {}
        for name, several in self.options.items():
            option = next((option for option in several if option.action == actions[name]), None)
            if option is None:
                return None
            chosen[name] = option
        return decision_of(chosen, self.moments, self.costs, is_narrow=is_narrow)

    def uniform(self, action: Action) -> Decision:
        """The decision for this action in each block; blocks that cannot be computed again are stored instead."""
        chosen = {}
        for name, several in self.options.items():
            by_action = {option.action: option for option in several}
            chosen[name] = by_action.get(action) or by_action.get(Action("store")) or by_action[Action("keep")]
        return decision_of(chosen, self.moments, self.costs)


class Trials:
    """Takes steps with actions applied.

    Args:
        model, run: as `plan_memory`'s.
        store: takes what is stored.
        meter: of the tier that is limited.
        limit_bytes: for the peak.
    """

    def __init__(
        self, model: nn.Module, run: Callable[[], torch.Tensor], store: TierStore, meter: Meter, limit_bytes: int
    ) -> None:
        self.model, self.store, self.meter, self.limit_bytes = model, store, meter, limit_bytes
        self.steps = Steps(model, run, meter)

    def __enter__(self) -> Self:
        self.limit_store(None)
        return self

    def __exit__(self, *_: object) -> None:
        self.store.plans.keep_within(self, None, None)

    def limit_store(self, staging_bytes: int | None) -> None:
        """Have the store return memory before the limit, and keep nothing there but what moves.

        `staging_bytes`: of its window; None: as it is.
        """
        if self.meter.is_of_host:
            self.store.plans.keep_within(self, self.limit_bytes, 0, staging_bytes)

    def tidy(self) -> None:
        """Wait until what is stored has left memory, and return what is free."""
        self.store.flush()
        self.meter.tidy()

    @property
    def spared_bytes(self) -> int:
        """What a narrow staging window spares of the limited memory."""
        return max(0, self.store.staging_bytes - NARROW_BYTES) if self.meter.is_of_host else 0

    def store_bytes(self) -> int:
        """Memory of the limited kind that the store holds for itself now."""
        return self.store.residency.slab.mapped_bytes if self.meter.is_of_host else 0

    def calls_of(
        self,
        actions: Mapping[str, Action],
        traits: Mapping[str, BlockTraits],
        min_bytes: int,
        prefetch: str = "learned",
    ) -> dict[str, PlannedCalls]:
        """What the calls of each block go through."""
        scope = ModuleScope(self.store, min_bytes=min_bytes, prefetch=prefetch)
        return {
            name: PlannedCalls(action, traits[name], scope if action.uses_store else None)
            for name, action in actions.items()
        }

    def take(self, decision: Decision, prices: Prices) -> MeasuredStep:
        """A trial of the decision: four steps, and up to four more while their peak still rises."""
        self.limit_store(decision.staging_bytes)
        return self._take(self.calls_of(decision.actions, prices.traits, prices.min_bytes), _MOST_STEPS)

    def take_by_turns(self, decisions: Sequence[Decision], prices: Prices) -> list[list[MeasuredStep]]:
        """Steps of each decision. They take turns, since a machine may be faster in one minute than in the next.

        In each turn a decision has two steps, of which the second counts: before the first, what another decision has
        left free is returned. Who goes first in one turn goes last in the next.
        """
        calls = [self.calls_of(decision.actions, prices.traits, prices.min_bytes) for decision in decisions]
        steps: list[list[MeasuredStep]] = [[] for _ in decisions]
        for turn in range(_NUM_TURNS):
            for place in range(len(decisions))[:: -1 if turn % 2 else 1]:
                self.limit_store(decisions[place].staging_bytes)
                self.tidy()
                returned_before = self._returned_bytes()
                first, second = self.steps.take(calls[place]), self.steps.take(calls[place])
                peak_bytes, returned_bytes = max(first.peak_bytes, second.peak_bytes), self._returned_bytes()
                steps[place].append(MeasuredStep(second.seconds, peak_bytes, returned_bytes - returned_before))
        return steps

    def take_four(self, calls: Mapping[str, Around]) -> MeasuredStep:
        """Four steps, whatever their peaks: several ranks have to take the same number."""
        return self._take(calls, _NUM_STEPS)

    def _take(self, calls: Mapping[str, Around], most_steps: int) -> MeasuredStep:
        """The first step lets the store learn its order, and takes back the memory that was returned before."""
        self.tidy()
        returned_before = self._returned_bytes()
        steps: list[MeasuredStep] = []
        while len(steps) < _NUM_STEPS or (len(steps) < most_steps and _still_rises(steps)):
            steps.append(self.steps.take(calls))
        return MeasuredStep(
            statistics.median(step.seconds for step in steps[1:]),
            max(step.peak_bytes for step in steps),
            self._returned_bytes() - returned_before,
        )

    def _returned_bytes(self) -> int:
        """Memory of the limited kind that was returned to the system so far, since it was short."""
        return self.store.stats().returned_bytes if self.meter.is_of_host else 0


def _still_rises(steps: Sequence[MeasuredStep]) -> bool:
    *before, last = (step.peak_bytes for step in steps)
    return last > (1 + _STILL_RISES) * max(before)


def measure_prices(trials: Trials) -> tuple[Prices, list[tuple[Decision, MeasuredStep]]]:
    """Find out the prices, within the limit. Also returns the decisions that were measured on the way.

    Raises:
        ConfigError: no block saves anything that could be moved, or something is around the model's calls already.
    """
    model, store, steps = trials.model, trials.store, trials.steps
    for name, module in model.named_modules():
        if around_calls_of(module) is not None:
            raise ConfigError("model", name or type(model).__name__, "it is offloaded or planned already: undo that")
    storages = Storages(model)
    tree = CallTree(model, storages)
    steps.take(tree.around, scope=tiered_offload(store, min_bytes=1, select=tree.saw))
    names = blocks_of(tree.root)
    if not names:
        raise ConfigError("model", type(model).__name__, "its modules save no tensors that could be moved")
    recording = _record(trials, names)
    communicates = any(call.communicates for call in recording.calls)
    if communicates and are_several():
        share_differences(recording.calls)
    calls = {name: [call for call in recording.calls if call.name == name] for name in names}
    calls = {name: several for name, several in calls.items() if several}
    min_bytes = _min_bytes(recording)
    traits = {name: _traits_of(several) for name, several in calls.items()}
    moments = _moments(trials, calls, traits, min_bytes)
    again = _again(calls)
    steps.take(trials.calls_of(again, traits, min_bytes))  # takes back the memory that was returned before
    planned = trials.calls_of(again, traits, min_bytes)
    recompute_step = steps.take(planned)
    recompute_seconds = {name: calls.recompute_seconds for name, calls in planned.items()}
    stored = trials.calls_of(dict.fromkeys(calls, Action("store")), traits, min_bytes)
    store_step = trials.take_four(stored)
    options = {name: _options(calls[name], recompute_seconds[name], recording, min_bytes) for name in calls}
    kinds = {name: type(model.get_submodule(name)).__name__ for name in calls}
    nothing = StepCosts(0.0, 0.0, 0)
    differs = {name: call.differs for name, several in calls.items() for call in several if call.differs}
    num_calls = max(1, tree.num_calls)
    prices = Prices(options, moments, nothing, kinds, traits, differs, min_bytes, num_calls, communicates)
    costs = _costs(prices, recompute_step.seconds - sum(recompute_seconds.values()), store_step.seconds, trials)
    prices = prices._replace(costs=costs)
    strategies = {Action("recompute", stores=True): recompute_step, Action("store"): store_step}
    return prices, [(prices.uniform(action), measured) for action, measured in strategies.items()]


def _traits_of(calls: Sequence[RecordedCall]) -> BlockTraits:
    return BlockTraits(sorted({buffer for call in calls for buffer in call.buffers}), calls[0].evaluates)


def _record(trials: Trials, names: Sequence[str]) -> BlockRecording:
    recording = BlockRecording(Storages(trials.model), trials.tidy)
    trials.steps.take(
        {name: BlockRecorder(name, recording) for name in names},
        scope=tiered_offload(trials.store, min_bytes=1, select=recording.saw),
        has_backward=False,
    )
    recording.end()
    return recording


def _min_bytes(recording: BlockRecording) -> int:
    """The largest limit under which little stays for being small."""
    sizes: dict[int, int] = {}
    for call in recording.calls:
        sizes |= call.saved
    whole_bytes = sum(sizes.values())
    for min_bytes in _MIN_BYTES:
        if sum(nbytes for nbytes in sizes.values() if nbytes < min_bytes) <= _MOST_SMALL * whole_bytes:
            return min_bytes
    return _MIN_BYTES[-1]


Calls = Mapping[str, Sequence[RecordedCall]]


def _again(calls: Calls) -> dict[str, Action]:
    """Compute again each block of which that is known to give the same bits, and store the others."""
    differing = {name for name, several in calls.items() if any(call.differs for call in several)}
    return {name: Action("store") if name in differing else Action("recompute", stores=True) for name in calls}


def _moments(trials: Trials, calls: Calls, traits: Mapping[str, BlockTraits], min_bytes: int) -> list[Moment]:
    """The memory of each moment beside what blocks keep: measured with all stored, and with all computed again.

    From then on `calls` says of blocks that are too large to be computed again within the limit that they are. If they
    are not, but are beside the store's whole staging window, that is narrow for the measurements that follow.
    """
    stored = _timeline(trials, dict.fromkeys(calls, Action("store")), traits, min_bytes)
    saved_bytes = {name: max(sum(call.saved.values()) for call in several) for name, several in calls.items()}
    _refuse_large(calls, stored, saved_bytes, trials.limit_bytes)
    recomputed = _timeline(trials, _again(calls), traits, min_bytes)
    store_bytes = _bytes_of_store(trials.store)
    least_bytes = store_bytes - trials.spared_bytes
    _refuse_large(calls, recomputed, dict.fromkeys(calls, least_bytes), trials.limit_bytes)
    again = {name for name, action in _again(calls).items() if action.kind == "recompute"}
    seen_bytes = (seen for number, seen in recomputed.backward_bytes.items() if recomputed.names[number] in again)
    if max(seen_bytes, default=0) + store_bytes > trials.limit_bytes:
        trials.limit_store(NARROW_BYTES)
    names = recomputed.names
    moments = [Moment(recomputed.first_bytes, frozenset())]
    for number, name in enumerate(names):
        holders = frozenset(names[: number + 1])
        moments.append(Moment(recomputed.forward_bytes[number], holders, name, stored.forward_bytes[number]))
    pending = set(range(len(names)))
    for number in recomputed.order:
        pending.discard(number)
        holders = frozenset(names[other] for other in pending)
        stored_bytes = stored.backward_bytes.get(number, recomputed.backward_bytes[number])
        moments.append(Moment(recomputed.backward_bytes[number], holders, names[number], stored_bytes))
    return moments


def _refuse_large(calls: Calls, timeline: StepTimeline, more_bytes: Mapping[str, int], limit_bytes: int) -> None:
    """Say of blocks that they are too large. `more_bytes`: memory that they take in backward beside what was seen.

    Not of blocks that communicate: other ranks, which have other sizes, wait for what they send.
    """
    for number, seen_bytes in timeline.backward_bytes.items():
        several = calls[name := timeline.names[number]]
        if seen_bytes + more_bytes[name] > limit_bytes and not any(call.communicates for call in several):
            for call in several:
                call.differs = call.differs or _TOO_LARGE


def _timeline(
    trials: Trials, actions: Mapping[str, Action], traits: Mapping[str, BlockTraits], min_bytes: int
) -> StepTimeline:
    """A step in which only what is alive is counted at each moment: nothing is read before it is asked for."""
    timeline = StepTimeline(trials.meter, trials.tidy, trials.store_bytes)
    planned = trials.calls_of(actions, traits, min_bytes, prefetch="none")
    trials.tidy()
    trials.steps.take({name: timeline.around(name, calls) for name, calls in planned.items()}, timeline=timeline)
    return timeline


def _options(
    calls: list[RecordedCall], recompute_seconds: float, recording: BlockRecording, min_bytes: int
) -> list[Option]:
    """The block's options; what is kept anyway, outside of blocks, costs nothing in any of them."""
    found = []
    for option in options_of(calls, recompute_seconds, min_bytes):
        kept = {name: nbytes for name, nbytes in option.kept.items() if name not in recording.rest}
        stored = {name: nbytes for name, nbytes in option.stored.items() if name not in recording.rest}
        found.append(Option(option.action, kept, stored, option.seconds))
    return found


def _costs(prices: Prices, recompute_base_seconds: float, store_seconds: float, trials: Trials) -> StepCosts:
    """The time of a plain step and of a stored byte, from two steps that store unequal numbers of bytes."""
    all_bytes = prices.uniform(Action("store")).stored_bytes
    inputs_bytes = prices.uniform(Action("recompute", stores=True)).stored_bytes
    per_byte = _USUAL_SECONDS
    if all_bytes - inputs_bytes > _LEAST_DIFFERENCE * all_bytes:
        per_byte = max((store_seconds - recompute_base_seconds) / (all_bytes - inputs_bytes), _LEAST_SECONDS)
    step_seconds = store_seconds - per_byte * all_bytes
    return StepCosts(step_seconds, per_byte, _bytes_of_store(trials.store), trials.spared_bytes)


def _bytes_of_store(store: TierStore) -> int:
    """Memory that the store itself needs."""
    return store.staging_bytes + _SCRATCH_BYTES

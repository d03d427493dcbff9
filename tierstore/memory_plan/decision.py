"""What a plan may do with each block, what each way costs, and the fastest choice within a limit. Pure numbers.

The choice is a mixed-integer program, solved by HiGHS (https://highs.dev). One step is a sequence of *moments*: each
call of a block in forward, then each in backward. At a moment, memory holds a base, what the moment itself needs, and
what blocks keep for a backward that is still to come. A storage that several blocks keep counts once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import highspy
import msgspec

from .call_tree import union
from .recording import RecordedCall

Kind = Literal["keep", "store", "recompute"]

NARROW_BYTES = 32 * 2**20
"""A narrow staging window of a store. What is larger passes through it alone, which is slow."""
LEAST_MARGIN = 1 / 50
"""The share of a limit that is left free at least."""
_LEAST_MARGIN_BYTES = 16 * 2**20
_SOLVER_SECONDS = 8.0
_GAP = 1e-3
_LATER = 1e-3
"""What is stored late in forward counts as that much dearer, so that of equal choices the one is made that stores early
tensors: backward asks for late ones at once."""
_MIB = 2.0**-20  # the program is in MiB: solvers work best with numbers of similar size
_LEAST_SHARE = 0.02
"""Outputs of operators that take less than this of the block's time are not worth holding."""
_MOST_PREFIXES = 6
_CALL_SECONDS = 40e-6
"""What selective checkpointing adds for each operator, in forward and backward together: it is called in Python. Also
the least that is believed of computing a block again."""


class HeldOutput(NamedTuple):
    """An operator whose output backward gets back instead of computing it: its number in the block, and its name."""

    number: int
    name: str


class Action(NamedTuple):
    """What is done with a block.

    "keep": its saved tensors stay where they are; "store": they go to the store; "recompute": backward computes them
    again, but gets the outputs of `held` back. `stores`: inputs and held outputs go to the store."""

    kind: Kind
    held: tuple[HeldOutput, ...] = ()
    stores: bool = False

    @property
    def uses_store(self) -> bool:
        return self.kind == "store" or self.stores

    def __str__(self) -> str:
        held = f", hold {len(self.held)} outputs" if self.held else ""
        return self.kind + held + (" in the store" if held and self.stores else ", store inputs" * self.stores)


class BlockPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is done with one block: a module by its name in `named_modules`, and its class.

    Attributes:
        action: "keep", "store" or "recompute".
        stores: of "recompute": the block's inputs and held outputs go to the store.
        held: of "recompute": operators whose outputs are held, as (number of the call, operator).
        buffers: its buffers that forward changes.
        evaluates: its modules that were in evaluation mode, by their names in it. Called in another mode, the block is
            not computed again.
        saved_bytes, kept_bytes, stored_bytes: what autograd saves in it, and what of that stays in memory until
            backward or goes to the store.
        differs: why it must not be computed again; "": it may be.
    """

    name: str
    module: str
    action: Kind = "keep"
    stores: bool = False
    held: tuple[HeldOutput, ...] = ()
    buffers: tuple[str, ...] = ()
    evaluates: tuple[str, ...] = ()
    saved_bytes: int = 0
    kept_bytes: int = 0
    stored_bytes: int = 0
    differs: str = ""

    def as_action(self) -> Action:
        return Action(self.action, self.held, self.stores)


@dataclass(frozen=True)
class Option:
    """An action; the storages that stay in memory and those that go to the store, with sizes; and the seconds added to
    the step beside what the store takes."""

    action: Action
    kept: Mapping[int, int]
    stored: Mapping[int, int]
    seconds: float


def options_of(
    calls: Sequence[RecordedCall], recompute_seconds: float, min_bytes: int, kept_anyway: Collection[int] = ()
) -> list[Option]:
    """What may be done with a block that is called as `calls` tell, once or more in a step. To compute it again takes
    `recompute_seconds`, as measured: a clock may show no time, or less. Storages of less than `min_bytes` stay where
    they are; those `kept_anyway` cost nothing. To keep and to store are offered in any case."""

    def both_ways(kept: Action, stored: Action, needed: Mapping[int, int], seconds: float) -> tuple[Option, Option]:
        charged = {name: nbytes for name, nbytes in needed.items() if name not in kept_anyway}
        large = {name: nbytes for name, nbytes in charged.items() if nbytes >= min_bytes}
        small = {name: nbytes for name, nbytes in charged.items() if nbytes < min_bytes}
        return Option(kept, charged, {}, seconds), Option(stored, small, large, seconds)

    plain = both_ways(Action("keep"), Action("store"), union(call.saved for call in calls), 0.0)
    if any(call.differs for call in calls) or not calls:
        return [*plain]
    again: list[Option] = []
    recompute_seconds = max(recompute_seconds, _CALL_SECONDS)
    recorded_seconds = max(sum(call.seconds for call in calls), 1e-9)
    are_alike = all(call.kind == calls[0].kind for call in calls)
    for held in (), *(_prefixes(calls[0]) if are_alike else ()):
        needed, seconds = union(call.inputs for call in calls), recompute_seconds
        for call in calls:
            for output in held:
                operator = call.operators[output.number]
                needed |= operator.outputs
                seconds -= operator.seconds * recompute_seconds / recorded_seconds
            if held:
                seconds += _CALL_SECONDS * len(call.operators)
        again += both_ways(Action("recompute", held), Action("recompute", held, stores=True), needed, seconds)
    return [*plain, *(option for option in again if not _is_worse(option, [*plain, *again]))]


def _prefixes(call: RecordedCall) -> list[tuple[HeldOutput, ...]]:
    """Sets of operators to hold: those that take most time for their bytes first, one more in each set."""
    worth = [
        (operator.seconds / max(sum(operator.outputs.values()), 1), index)
        for index, operator in enumerate(call.operators)
        if operator.can_be_held and operator.seconds >= _LEAST_SHARE * call.seconds
    ]
    ranked = [index for _, index in sorted(worth, reverse=True)]
    step = max(-(-len(ranked) // _MOST_PREFIXES), 1)
    lengths = range(len(ranked), 0, -step)
    return [
        tuple(HeldOutput(index, call.operators[index].name) for index in sorted(ranked[:length]))
        for length in reversed(lengths)
    ]


def _is_worse(option: Option, options: Sequence[Option]) -> bool:
    """Whether another option needs no more of anything, and less of something. Only what is kept is compared so."""
    mine = sum(option.kept.values()), sum(option.stored.values()), option.seconds
    return any(
        other.kept.items() <= option.kept.items()
        and other.stored.items() <= option.stored.items()
        and other.seconds <= option.seconds
        and (sum(other.kept.values()), sum(other.stored.values()), other.seconds) != mine
        for other in options
    )


@dataclass(frozen=True)
class Moment:
    """A part of the step: `bytes` are used at most, beside what `holders` keep for later, while `block` is called or
    its backward runs; `stored_bytes` instead if its saved tensors go to the store and come back one by one."""

    bytes: int
    holders: frozenset[str]
    block: str | None = None
    stored_bytes: int = 0

    def bytes_for(self, option: Option) -> int:
        return self.stored_bytes if option.action.kind == "store" else self.bytes


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step in which all is kept, and of each byte that goes to the store and comes back; and memory that
    the store itself needs if anything goes to it, with its staging window as `staging_bytes` (None: as it was opened).
    """

    step_seconds: float
    store_seconds: float
    store_bytes: int
    staging_bytes: int | None = None


@dataclass(frozen=True)
class Decision:
    """An option for each block; peak and step as predicted; the bytes that go to the store in a step; and its staging
    window meanwhile (None: as it was opened)."""

    chosen: Mapping[str, Option]
    peak_bytes: int
    step_seconds: float
    stored_bytes: int
    staging_bytes: int | None = None

    @property
    def actions(self) -> dict[str, Action]:
        return {name: option.action for name, option in self.chosen.items()}

    @property
    def does(self) -> tuple[dict[str, Action], int | None]:
        """What it does, whatever that is expected to cost."""
        return self.actions, self.staging_bytes


class Prices(NamedTuple):
    """All that a decision needs to know, but the limit. `spared_bytes`: how much less the store needs if its staging
    window is narrow. `blocks`: what is known of each, whatever is decided. Smaller tensors than `min_bytes` are not
    stored. `num_calls`: of the model in a step."""

    options: Mapping[str, Sequence[Option]]
    moments: Sequence[Moment]
    costs: StepCosts
    spared_bytes: int = 0
    blocks: Mapping[str, BlockPlan] = {}
    min_bytes: int = 0
    num_calls: int = 1

    def narrow(self) -> Prices:
        """The prices with a narrow staging window, if that spares anything."""
        if not self.spared_bytes:
            return self
        costs = replace(self.costs, store_bytes=self.costs.store_bytes - self.spared_bytes, staging_bytes=NARROW_BYTES)
        return self._replace(costs=costs, spared_bytes=0)

    def decide(self, limit_bytes: int | None) -> Decision | None:
        """The fastest decision within the limit; None: there is none. Without a limit: that with the least peak."""
        chosen = _Program(self, limit_bytes).solve()
        return None if chosen is None else self.decision_of(chosen)

    def decision_of(self, chosen: Mapping[str, Option]) -> Decision:
        stored = union(option.stored for option in chosen.values())
        stored_bytes, costs = sum(stored.values()), self.costs
        peak_bytes = max([0, *(_bytes_at(moment, chosen) for moment in self.moments)])
        added_seconds = sum(option.seconds for option in chosen.values()) + costs.store_seconds * stored_bytes
        return Decision(
            chosen,
            peak_bytes + (costs.store_bytes if stored else 0),
            costs.step_seconds + added_seconds,
            stored_bytes,
            costs.staging_bytes if stored else None,
        )

    def uniform(self, action: Action) -> Decision:
        """This action in each block; blocks that cannot be computed again are stored instead, and where that would
        spare nothing they keep what they save. Outputs are held where that costs nothing."""
        chosen = {}
        for name, several in self.options.items():
            by_kind: dict[tuple[Kind, bool], Option] = {}
            for option in several:  # those that hold least come first
                by_kind.setdefault((option.action.kind, option.action.stores), option)
            could_be_computed = name in self.blocks and not self.blocks[name].differs
            stored = by_kind.get(("store", False), by_kind["keep", False])
            otherwise = by_kind["keep", False] if could_be_computed else stored
            chosen[name] = by_kind.get((action.kind, action.stores), otherwise)
        return self.decision_of(chosen)


def _bytes_at(moment: Moment, chosen: Mapping[str, Option]) -> int:
    kept = union(chosen[name].kept for name in moment.holders)
    return sum(kept.values()) + (moment.bytes if moment.block is None else moment.bytes_for(chosen[moment.block]))


def with_margin(peak_bytes: int, share: float = LEAST_MARGIN) -> int:
    """The least limit under which a step with this peak is tried. `share`: of that limit, which is left free."""
    return peak_bytes + margin_of(share, int(peak_bytes / (1 - share)))


def margin_of(share: float, limit_bytes: int) -> int:
    """What is left free of a limit: that share, or a little."""
    return max(_LEAST_MARGIN_BYTES, int(share * limit_bytes))


class _Program:
    """The mixed-integer program of one decision. Rows bound sums of columns. A column of 0 or 1 stands for each option
    of each block, and for each storage that any of several blocks keep (or store)."""

    def __init__(self, prices: Prices, limit_bytes: int | None) -> None:
        self._shared = _shared_storages(prices.options)
        self._solver = highspy.Highs()  # type: ignore[no-untyped-call]
        self._solver.setOptionValue("output_flag", False)
        self._solver.setOptionValue("time_limit", _SOLVER_SECONDS)
        self._solver.setOptionValue("mip_rel_gap", _GAP)
        self._holding: defaultdict[tuple[str, int], dict[str, list[int]]] = defaultdict(dict)  # columns, by block
        self._any_of: dict[tuple[str, int, frozenset[str]], int] = {}
        self._options: dict[str, list[tuple[int, Option]]] = {}
        second = 1.0 if limit_bytes is not None else 1e-6  # what a second costs, beside a peak that costs 1 a MiB
        byte_seconds = prices.costs.store_seconds
        for number, (name, several) in enumerate(prices.options.items()):
            dearer = 1 + _LATER * number / len(prices.options)
            self._options[name] = [
                (self._column(second * (each.seconds + byte_seconds * self._own_bytes(each.stored) * dearer)), each)
                for each in several
            ]
        for name, own in self._options.items():
            self._row({column: 1.0 for column, _ in own}, 1.0, 1.0)
            for column, option in own:
                self._solver.changeColIntegrality(column, highspy.HighsVarType.kInteger)
                for way, storages in (("kept", option.kept), ("stored", option.stored)):
                    for storage in storages.keys() & self._shared.keys():
                        self._holding[way, storage].setdefault(name, []).append(column)
        uses_store = self._column(0.0)
        for own in self._options.values():
            self._row({uses_store: 1.0} | {column: -1.0 for column, option in own if option.stored}, 0.0)
        for column, nbytes in self._columns_of_any("stored", frozenset(self._options)).items():
            self._solver.changeColCost(column, second * byte_seconds * nbytes)
        rest = {uses_store: prices.costs.store_bytes * _MIB}
        if limit_bytes is None:
            rest[self._column(1.0, most=highspy.kHighsInf)] = -1.0  # the peak
        for moment in prices.moments:
            self._row(rest | self._row_of(moment), -highspy.kHighsInf, ((limit_bytes or 0) - moment.bytes) * _MIB)

    def solve(self) -> dict[str, Option] | None:
        self._solver.run()
        if self._solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        values = list(self._solver.getSolution().col_value)
        return {name: max(own, key=lambda each: values[each[0]])[1] for name, own in self._options.items()}

    def _column(self, cost: float, most: float = 1.0) -> int:
        self._solver.addCol(cost, 0.0, most, 0, [], [])
        return int(self._solver.getNumCol()) - 1

    def _row(self, row: Mapping[int, float], least: float, most: float = highspy.kHighsInf) -> None:
        self._solver.addRow(least, most, len(row), list(row), list(row.values()))

    def _own_bytes(self, storages: Mapping[int, int]) -> int:
        return sum(nbytes for storage, nbytes in storages.items() if storage not in self._shared)

    def _row_of(self, moment: Moment) -> dict[int, float]:
        """MiB beside those that the moment takes in any case."""
        row: dict[int, float] = {}
        for name in moment.holders:
            row |= {column: self._own_bytes(option.kept) * _MIB for column, option in self._options[name]}
        any_of = self._columns_of_any("kept", moment.holders)
        row |= {column: nbytes * _MIB for column, nbytes in any_of.items()}
        if moment.block is not None:
            for column, option in self._options[moment.block]:
                row[column] = row.get(column, 0.0) + (moment.bytes_for(option) - moment.bytes) * _MIB
        return row

    def _columns_of_any(self, way: str, blocks: frozenset[str]) -> dict[int, int]:
        """For each storage that several blocks may share: the column that is 1 if any of these keeps (or stores) it,
        and its size."""
        found = {}
        for storage, nbytes in self._shared.items():
            holding = self._holding[way, storage]
            key = way, storage, blocks.intersection(holding)
            if key[2] and key not in self._any_of:
                self._any_of[key] = self._column(0.0)
                for name in key[2]:
                    self._row({self._any_of[key]: 1.0} | dict.fromkeys(holding[name], -1.0), 0.0)
            if key[2]:
                found[self._any_of[key]] = nbytes
        return found


def _shared_storages(options: Mapping[str, Sequence[Option]]) -> dict[int, int]:
    users: dict[int, set[str]] = {}
    sizes: dict[int, int] = {}
    for name, several in options.items():
        for storage, nbytes in union({**each.kept, **each.stored} for each in several).items():
            users.setdefault(storage, set()).add(name)
            sizes[storage] = nbytes
    return {storage: sizes[storage] for storage, names in users.items() if len(names) > 1}

"""The fastest choice of options within a limit: a mixed-integer program, solved by HiGHS (https://highs.dev).

Pure numbers. One step is a sequence of *moments*: each call of a block in forward, then each in backward.
At a moment, memory holds a base, what the moment itself needs, and what blocks keep for a backward that is still to
come. A storage that several blocks keep counts once, until the last of them has used it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import highspy

from .menu import Action, BlockTraits, Option

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
    """Seconds of a step in which all is kept, and of each byte that goes to the store and comes back; memory that the
    store itself needs if anything goes to it, and how much of that a narrow window spares."""

    step_seconds: float
    store_seconds: float
    store_bytes: int
    spared_bytes: int = 0


@dataclass(frozen=True)
class Decision:
    """An option for each block; peak and step as predicted; the bytes that go to the store in a step; and whether its
    staging window is `NARROW_BYTES` meanwhile."""

    chosen: Mapping[str, Option]
    peak_bytes: int
    step_seconds: float
    stored_bytes: int
    is_narrow: bool = False

    @property
    def staging_bytes(self) -> int | None:
        return NARROW_BYTES if self.is_narrow else None

    def does_the_same(self, other: Decision) -> bool:
        """Whether both do the same, whatever they were expected to cost."""
        return self.actions == other.actions and self.is_narrow == other.is_narrow

    @property
    def actions(self) -> dict[str, Action]:
        return {name: option.action for name, option in self.chosen.items()}


class Prices(NamedTuple):
    """All that a decision needs to know, but the limit; and of the blocks: the classes of their modules, why some must
    not be computed again, which tensors are too small to be stored, and how often a step calls the model."""

    options: Mapping[str, Sequence[Option]]
    moments: Sequence[Moment]
    costs: StepCosts
    kinds: Mapping[str, str] = {}
    traits: Mapping[str, BlockTraits] = {}
    differs: Mapping[str, str] = {}
    min_bytes: int = 0
    num_calls: int = 1

    def decide(self, limit_bytes: int | None, *, is_narrow: bool = False) -> Decision | None:
        """The fastest decision within the limit; None: there is none. Without a limit: that with the least peak."""
        chosen = _Program(self, self._store_bytes(is_narrow), limit_bytes).solve()
        return None if chosen is None else self.decision_of(chosen, is_narrow=is_narrow)

    def decision_of(self, chosen: Mapping[str, Option], *, is_narrow: bool = False) -> Decision:
        """With a narrow staging window if something is stored and that is wanted."""
        stored: dict[int, int] = {}
        for option in chosen.values():
            stored |= option.stored
        stored_bytes = sum(stored.values())
        is_narrow = is_narrow and stored_bytes > 0 and self.costs.spared_bytes > 0
        peak_bytes = max([0, *(_bytes_at(moment, chosen) for moment in self.moments)])
        peak_bytes += self._store_bytes(is_narrow) if stored else 0
        added_seconds = sum(option.seconds for option in chosen.values()) + self.costs.store_seconds * stored_bytes
        return Decision(chosen, peak_bytes, self.costs.step_seconds + added_seconds, stored_bytes, is_narrow)

    def uniform(self, action: Action, *, is_narrow: bool = False) -> Decision:
        """This action in each block; blocks that cannot be computed again are stored instead."""
        chosen = {}
        for name, several in self.options.items():
            by_action = {option.action: option for option in several}
            chosen[name] = by_action.get(action) or by_action.get(Action("store")) or by_action[Action("keep")]
        return self.decision_of(chosen, is_narrow=is_narrow)

    def _store_bytes(self, is_narrow: bool) -> int:
        return self.costs.store_bytes - is_narrow * self.costs.spared_bytes


def _bytes_at(moment: Moment, chosen: Mapping[str, Option]) -> int:
    kept: dict[int, int] = {}
    for name in moment.holders:
        kept |= chosen[name].kept
    return sum(kept.values()) + (moment.bytes if moment.block is None else moment.bytes_for(chosen[moment.block]))


def with_margin(peak_bytes: int, share: float = LEAST_MARGIN) -> int:
    """The least limit under which a step with this peak is tried. `share`: of that limit, which is left free."""
    return peak_bytes + margin_of(share, int(peak_bytes / (1 - share)))


def margin_of(share: float, limit_bytes: int) -> int:
    """What is left free of a limit: that share, or a little."""
    return max(_LEAST_MARGIN_BYTES, int(share * limit_bytes))


class _Program:
    """The mixed-integer program of one decision. Rows bound sums of columns."""

    def __init__(self, prices: Prices, store_bytes: int, limit_bytes: int | None) -> None:
        self._options, self._costs = prices.options, prices.costs
        self._shared = _shared_storages(prices.options)
        self._solver = highspy.Highs()  # type: ignore[no-untyped-call]
        self._solver.setOptionValue("output_flag", False)
        self._solver.setOptionValue("time_limit", _SOLVER_SECONDS)
        self._solver.setOptionValue("mip_rel_gap", _GAP)
        self._any_of: dict[tuple[str, int, frozenset[str]], int] = {}
        self._second = 1.0 if limit_bytes is not None else 1e-6  # what a second costs, beside a peak that costs 1 a MiB
        self._chosen = {
            name: [self._column(self._seconds(option, place / len(self._options))) for option in several]
            for place, (name, several) in enumerate(self._options.items())
        }
        for columns in self._chosen.values():
            self._row(dict.fromkeys(columns, 1.0), 1.0, 1.0)
            for column in columns:
                self._solver.changeColIntegrality(column, highspy.HighsVarType.kInteger)
        self._uses_store = self._add_store()
        self._peak = self._column(1.0, most=highspy.kHighsInf) if limit_bytes is None else None
        for moment in prices.moments:
            self._add_moment(moment, store_bytes, limit_bytes or 0)

    def solve(self) -> dict[str, Option] | None:
        self._solver.run()
        if self._solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        values = list(self._solver.getSolution().col_value)
        return {
            name: self._options[name][max(range(len(own)), key=lambda place: values[own[place]])]
            for name, own in self._chosen.items()
        }

    def _column(self, cost: float, most: float = 1.0) -> int:
        self._solver.addCol(cost, 0.0, most, 0, [], [])
        return int(self._solver.getNumCol()) - 1

    def _row(self, row: Mapping[int, float], least: float, most: float = highspy.kHighsInf) -> None:
        self._solver.addRow(least, most, len(row), list(row), list(row.values()))

    def _seconds(self, option: Option, place: float) -> float:
        """`place`: of the block in forward, from 0 to 1."""
        stored_seconds = self._costs.store_seconds * self._own_bytes(option.stored)
        return self._second * (option.seconds + stored_seconds * (1 + _LATER * place))

    def _own_bytes(self, storages: Mapping[int, int]) -> int:
        return sum(nbytes for storage, nbytes in storages.items() if storage not in self._shared)

    def _add_store(self) -> int:
        """Have shared storages that are stored cost time. Returns the column that is 1 if anything is stored."""
        uses_store = self._column(0.0)
        for name, several in self._options.items():
            storing = [column for column, option in zip(self._chosen[name], several, strict=True) if option.stored]
            if storing:
                self._row({uses_store: 1.0} | dict.fromkeys(storing, -1.0), 0.0)
        for storage, nbytes in self._shared.items():
            column = self._column_of_any("stored", storage, frozenset(self._options))
            if column is not None:
                self._solver.changeColCost(column, self._second * self._costs.store_seconds * nbytes)
        return uses_store

    def _add_moment(self, moment: Moment, store_bytes: int, limit_bytes: int) -> None:
        row = {self._uses_store: store_bytes * _MIB}
        for name in moment.holders:
            for column, option in zip(self._chosen[name], self._options[name], strict=True):
                row[column] = self._own_bytes(option.kept) * _MIB
        for storage, nbytes in self._shared.items():
            column_of_any = self._column_of_any("kept", storage, moment.holders)
            if column_of_any is not None:
                row[column_of_any] = nbytes * _MIB
        if moment.block is not None:
            for column, option in zip(self._chosen[moment.block], self._options[moment.block], strict=True):
                row[column] = row.get(column, 0.0) + (moment.bytes_for(option) - moment.bytes) * _MIB
        if self._peak is not None:
            row[self._peak] = -1.0
        self._row(row, -highspy.kHighsInf, (limit_bytes - moment.bytes) * _MIB)

    def _column_of_any(self, way: str, storage: int, blocks: frozenset[str]) -> int | None:
        """A column that is 1 if any of the blocks keeps (or stores) the storage; None: no option of theirs does."""
        holders = frozenset(
            name for name in blocks if any(storage in _held(option, way) for option in self._options[name])
        )
        if not holders:
            return None
        key = way, storage, holders
        if key not in self._any_of:
            self._any_of[key] = column = self._column(0.0)
            for name in holders:
                several = zip(self._chosen[name], self._options[name], strict=True)
                holding = [own for own, option in several if storage in _held(option, way)]
                self._row({column: 1.0} | dict.fromkeys(holding, -1.0), 0.0)
        return self._any_of[key]


def _held(option: Option, way: str) -> Mapping[int, int]:
    return option.kept if way == "kept" else option.stored


def _shared_storages(options: Mapping[str, Sequence[Option]]) -> dict[int, int]:
    users: dict[int, set[str]] = {}
    sizes: dict[int, int] = {}
    for name, several in options.items():
        for option in several:
            for storage, nbytes in (*option.kept.items(), *option.stored.items()):
                users.setdefault(storage, set()).add(name)
                sizes[storage] = nbytes
    return {storage: sizes[storage] for storage, names in users.items() if len(names) > 1}

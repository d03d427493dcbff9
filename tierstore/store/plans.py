"""What memory plans ask of a store: limits while they are applied, and a place for their figures."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple


class PlansOfStore:
    """The memory plans that use one store.

    A plan may die without a word, and nothing runs then: see NOTE [No finalizers] in `remains.py`. The next call of the
    store finds that the plan is gone, and sets the limits of those that are left (`drain`). Any thread may call.

    `limit_process` sets a limit of the process's resident memory, before which freed memory is returned; None: none.
    `limit_windows` sets the host memory that the store may hold, and its staging window."""

    def __init__(
        self,
        limit_process: Callable[[int | None], None],
        limit_windows: Callable[[int, int], None],
        host_bytes: int,
        staging_bytes: int,
    ) -> None:
        self._limit_process, self._limit_windows = limit_process, limit_windows
        self._wishes: dict[_Wishes, None] = {}  # in the order in which the plans asked
        self._opened = _Limits(None, host_bytes, staging_bytes)
        self._limits = self._opened  # in force
        self.had_any = False

    @property
    def figures(self) -> Mapping[str, float]:
        return next((wishes.figures for wishes in reversed(self._living()) if wishes.figures), {})

    @property
    def limits_process(self) -> bool:
        return any(wishes.limits.process_bytes is not None for wishes in self._living())

    def keep_within(
        self, plan: object, limit_bytes: int | None, host_bytes: int | None, staging_bytes: int | None = None
    ) -> None:
        """Set a plan's limits; all None: it has none any more. Of several plans, the least limits hold.

        They are gone with `plan`. `limit_bytes`: of the resident memory of the process. `host_bytes`, `staging_bytes`:
        what the store may hold, and beside that its staging window; None: as it was opened."""
        self._wishes_of(plan).limits = _Limits(limit_bytes, host_bytes, staging_bytes)
        self.drain()

    def tell(self, plan: object, figures: Mapping[str, float]) -> None:
        """Have `stats().memory_plan` give these figures, until another plan tells its own; empty: the plan ends."""
        wishes = self._wishes_of(plan)
        wishes.figures = dict(figures)
        self._wishes.pop(wishes, None)
        self._wishes[wishes] = None
        self.drain()

    def drain(self) -> None:
        """Forget the plans that have ended or died, and set the limits of the others. Cheap if there is no plan."""
        if not self._wishes and self._limits == self._opened:
            return  # every `put` comes here
        for wishes in list(self._wishes):
            if wishes.are_over:
                self._wishes.pop(wishes, None)
        # If two threads set limits at once, the one that sets them last looks again.
        while self._limits != (limits := self._least_limits()):
            self._limit_process(limits.process_bytes)
            self._limit_windows(limits.host_bytes or 0, limits.staging_bytes or 0)
            self._limits = limits

    def _least_limits(self) -> _Limits:
        several = [self._opened, *(wishes.limits for wishes in self._living())]
        kinds = zip(*several, strict=True)
        return _Limits(*(min((nbytes for nbytes in kind if nbytes is not None), default=None) for kind in kinds))

    def _living(self) -> list[_Wishes]:
        return [wishes for wishes in list(self._wishes) if not wishes.are_over]

    def _wishes_of(self, plan: object) -> _Wishes:
        found = next((wishes for wishes in list(self._wishes) if wishes.plan() is plan), None)
        if found is None:
            found = _Wishes(plan)
            self.had_any = True
            self._wishes[found] = None
        return found


class _Limits(NamedTuple):
    """Limits of the process's resident memory, and of the store's two windows; None: none of its own."""

    process_bytes: int | None = None
    host_bytes: int | None = None
    staging_bytes: int | None = None


class _Wishes:
    """What a plan, which this refers to weakly, has asked for."""

    def __init__(self, plan: object) -> None:
        self.plan = weakref.ref(plan)
        self.limits = _Limits()
        self.figures: Mapping[str, float] = {}

    @property
    def are_over(self) -> bool:
        return self.plan() is None or not (self.figures or self.limits != _Limits())

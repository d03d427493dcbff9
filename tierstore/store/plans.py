"""What memory plans ask of a store: limits while they are applied, and a place for their figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

__all__ = ["PlansOfStore"]


class PlansOfStore:
    """The memory plans that use one store.

    Args:
        limit_process: sets a limit of the process's resident memory, before which freed memory is returned; None: none.
        limit_host: sets the host memory that the store may hold, staging aside.
        host_bytes: what the store was opened with.
    """

    def __init__(
        self, limit_process: Callable[[int | None], None], limit_host: Callable[[int], None], host_bytes: int
    ) -> None:
        self._limit_process, self._limit_host, self._host_bytes = limit_process, limit_host, host_bytes
        self._limits: WeakKeyDictionary[object, tuple[int | None, int | None]] = WeakKeyDictionary()
        self._figures: WeakKeyDictionary[object, Mapping[str, float]] = WeakKeyDictionary()

    @property
    def figures(self) -> Mapping[str, float]:
        """Those of the plan that told last; empty: no plan is applied."""
        return next(reversed(list(self._figures.values())), {})

    @property
    def limits_process(self) -> bool:
        """Whether a plan limits the process's resident memory now."""
        return any(limit is not None for limit, _ in self._limits.values())

    def keep_within(self, plan: object, limit_bytes: int | None, host_bytes: int | None) -> None:
        """Set the limits of a plan; both None: it has none any more. Of several plans, the least limits hold.

        Args:
            plan: whose limits these are; they are gone with it.
            limit_bytes: of the resident memory of the process.
            host_bytes: what the store may hold, staging aside. None: as it was opened.
        """
        self._limits.pop(plan, None)
        if limit_bytes is not None or host_bytes is not None:
            self._limits[plan] = limit_bytes, host_bytes
        pairs = list(self._limits.values())
        self._limit_process(min((limit for limit, _ in pairs if limit is not None), default=None))
        self._limit_host(min((host for _, host in pairs if host is not None), default=self._host_bytes))

    def tell(self, plan: object, figures: Mapping[str, float]) -> None:
        """Have `stats().memory_plan` give these figures, until another plan tells its own; empty: the plan ends."""
        self._figures.pop(plan, None)
        if figures:
            self._figures[plan] = dict(figures)

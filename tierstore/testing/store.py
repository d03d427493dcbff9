"""A store into which faults are injected."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from os import PathLike
from typing import Any, Self

from ..disk.tier import DiskTier
from ..store.options import StoreOptions
from ..store.tier_store import TierStore
from ..tensors.copies import AcceleratorCopies
from .copies import FaultyCopies
from .faults import Faults
from .faulty_disk import FaultyDisk
from .plan import FaultPlan
from .system_calls import FaultyCalls, FaultyExecutor


class FaultyStore(TierStore):
    """A `TierStore` whose disk tier, system calls and copy engine fail as a plan says. Opening it does not fail.
    `faults` carries the plan out and counts what it has done; `faults.set` replaces it at any time."""

    faults: Faults

    def __init__(
        self, path: str | PathLike[str] | Sequence[str | PathLike[str]], plan: FaultPlan | None = None, **options: Any
    ) -> None:
        super().__init__(path, **options)
        self.faults.set(plan or FaultPlan())

    @classmethod
    def connect(
        cls, address: str | PathLike[str] | None = None, *, plan: FaultPlan | None = None, **options: Any
    ) -> Self:
        """As `TierStore.connect`, with a plan. System calls are the daemon's: see `faulty_daemon` for those."""
        store = super().connect(address, **options)
        store.faults.set(plan or FaultPlan())
        return store

    def _begin(self, options: StoreOptions) -> None:
        faults = self.faults = Faults()

        async def open_faulty(executor: Executor) -> DiskTier:
            disk = await options.open_disk(FaultyExecutor(executor, FaultyCalls(faults)))
            return FaultyDisk(disk, faults)

        copies = FaultyCopies(options.copies or AcceleratorCopies(), faults)
        super()._begin(options._replace(open_disk=open_faulty, copies=copies))

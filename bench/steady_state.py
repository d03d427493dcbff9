"""From the second step on: is anything written that need not be?

All that the model saves is alive at the end of forward, so what a step saves (and nobody else keeps) beyond the host
budget has to leave memory, and nothing more. Backward waits until every write that was decided on is done. Where it
does not ("backward at once") and the drive is slow, many writes are still queued when backward begins: none of those
may begin any more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tierstore import TierStore
from tierstore.residency.handle import Record
from tierstore.rules.state import State

from .branching import SAVED_BYTES, SETTINGS, medians, train
from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .paced_drive import open_paced_store

STEPS = 3
SHARES = {"host budget 0": 0.0, "an eighth": 1 / 8, "half": 1 / 2, "seven eighths": 7 / 8}
AT_ONCE = "an eighth, slow drive, backward at once"
SLOW_BYTES_PER_SECOND = 200 * 2**20

BENCHMARK = Benchmark(
    name="steady_state",
    question="Bytes spilled per step, of saved beyond the host budget; and of those queued when backward began",
    variants=(*SHARES, AT_ONCE),
    rounds=1,
    compare="difference",
    at_once=2,
    settings=SETTINGS | {"steps": STEPS, "slow_bytes_per_second": SLOW_BYTES_PER_SECOND},
    goals=(
        *(
            Goal(
                "spilled, percent of saved beyond the budget",
                "spilled_of_saved_beyond_budget_percent",
                share,
                at_most=105,
            )
            for share in SHARES
        ),
        Goal("queued when backward began", "queued_when_backward_began_bytes", AT_ONCE, at_least=2**20),
        Goal("of that, written nevertheless", "queued_and_written_nevertheless_bytes", AT_ONCE, at_most=0),
    ),
)


class QueuedWrites:
    """What is queued to be written when backward first asks, and what of it is written nevertheless."""

    def __init__(self, store: TierStore) -> None:
        self.queued_bytes = self.written_bytes = 0
        self._residency = residency = store.residency
        self._fetch, self._begin_spill = residency.fetch, residency.begin_spill
        self._queued: set[int] = set()
        self._in_backward = False
        residency.fetch = self.fetch  # type: ignore[method-assign]
        residency.begin_spill = self.begin_spill  # type: ignore[method-assign]

    def forward_ended(self) -> None:
        self._in_backward = False

    def fetch(self, *arguments: Any) -> torch.Tensor:
        if not self._in_backward:
            self._in_backward = True
            with self._residency.lock:
                queued = [r for r in self._residency.records if r.state is State.QUEUED]
                self._queued = {record.key for record in queued}
            self.queued_bytes += sum(record.nbytes for record in queued)
        return self._fetch(*arguments)

    def begin_spill(self, record: Record) -> Any:
        spill = self._begin_spill(record)
        if spill is not None and self._in_backward and record.key in self._queued:
            self.written_bytes += len(spill.source)
        return spill


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """Medians after the first step; of queued writes the sums over all steps."""
    torch.set_num_threads(1)
    host_bytes = int(SHARES[variant.split(",")[0]] * SAVED_BYTES)
    options: dict[str, Any] = {"host_bytes": host_bytes, "codec": "none"}
    if variant == AT_ONCE:
        opened = open_paced_store(scratch, SLOW_BYTES_PER_SECOND, **options)
    else:
        opened = TierStore(scratch, **options)
    with opened as store:
        queued = QueuedWrites(store)

        def between() -> None:
            if variant != AT_ONCE:
                store.flush()
            queued.forward_ended()

        steps = train(store, STEPS, between)
    return {
        "saved_bytes": medians(steps, lambda step: step.saved_bytes),
        "spilled_bytes": medians(steps, lambda step: step.spilled_bytes),
        "spilled_of_saved_beyond_budget_percent": medians(
            steps, lambda step: 100 * step.spilled_bytes / (step.saved_bytes - host_bytes)
        ),
        "queued_when_backward_began_bytes": queued.queued_bytes,
        "queued_and_written_nevertheless_bytes": queued.written_bytes,
    }


if __name__ == "__main__":
    main_of_one_variant(measure)

"""Copy engines for tests: the one without an accelerator, and the faults around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tierstore.testing import FaultPlan, Faults, FaultyCopies, Late, Rule, SimulatedCopies

CPU = torch.device("cpu")


@pytest.fixture
def simulated() -> Iterator[SimulatedCopies]:
    with SimulatedCopies() as copies:
        yield copies


def _bytes(number: int) -> torch.Tensor:
    return torch.full((100,), number, dtype=torch.uint8)


def _faulty(simulated: SimulatedCopies, *rules: Rule) -> FaultyCopies:
    return FaultyCopies(simulated, Faults(FaultPlan.of(*rules)))


def test_late_event_is_there_after_so_many_copies_or_for_who_waits_for_it(simulated: SimulatedCopies) -> None:
    copies = _faulty(simulated, Rule("offload", Late(2), occurrences=(1,)))
    slots = [torch.zeros(100, dtype=torch.uint8) for _ in range(3)]
    events = []
    for slot in slots:
        assert not events or not events[0].query()
        events.append(copies.copy_out(_bytes(7), slot, "compute"))
        simulated.synchronize()
    assert all(event.query() for event in events)
    copies = _faulty(simulated, Rule("offload", Late(1000)))
    slot = torch.zeros(100, dtype=torch.uint8)
    event = copies.copy_out(_bytes(7), slot, "compute")
    simulated.synchronize()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert torch.equal(slot, _bytes(7))

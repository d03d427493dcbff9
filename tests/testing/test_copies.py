"""Copy engines for tests: the one without an accelerator, and the faults around it."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
import torch

from tierstore.residency.copies import Copies
from tierstore.testing import Fails, FaultPlan, Faults, FaultyCopies, Late, Latency, Rule, SimulatedCopies

CPU = torch.device("cpu")


@pytest.fixture
def simulated() -> Iterator[SimulatedCopies]:
    with SimulatedCopies() as copies:
        yield copies


def _bytes(number: int) -> torch.Tensor:
    return torch.full((100,), number, dtype=torch.uint8)


def _faulty(simulated: SimulatedCopies, *rules: Rule) -> FaultyCopies:
    return FaultyCopies(simulated, Faults(FaultPlan.of(*rules)))


@pytest.mark.parametrize("faulty", [False, True])
def test_bytes_out_and_in_again_are_the_same(simulated: SimulatedCopies, faulty: bool) -> None:
    copies: Copies = simulated
    if faulty:
        late = Rule("offload", Late(3)), Rule("reload", Latency(0.001, "uniform"))
        copies = _faulty(simulated, *late)
    stream = copies.current_stream(CPU)
    for number in range(5):
        slot = torch.zeros(100, dtype=torch.uint8)
        out = copies.copy_out(_bytes(number), slot, stream)
        back, copied = copies.copy_in(slot, CPU, stream, out)
        copies.wait(stream, copied)
        assert torch.equal(back, _bytes(number))
    assert (simulated.num_out, simulated.num_in) == (5, 5)


def test_copy_that_fails_copies_nothing_and_says_why(simulated: SimulatedCopies) -> None:
    copies = _faulty(simulated, Rule(("offload", "reload"), Fails(errno.EIO), occurrences=(1,)))
    slot = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"offload: Input/output error \(injected\)"):
        copies.copy_out(_bytes(1), slot, "compute")
    with pytest.raises(RuntimeError, match=r"reload: Input/output error \(injected\)"):
        copies.copy_in(slot, CPU, "compute", None)
    simulated.synchronize()
    assert not slot.any()
    copies.copy_out(_bytes(1), slot, "compute").synchronize()
    assert torch.equal(slot, _bytes(1))


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

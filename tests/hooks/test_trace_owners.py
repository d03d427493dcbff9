"""A trace tells from when on nobody but the store holds what was saved, whether the store had to find out or not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import MakeStore
from tierstore import TierStore, tiered_offload
from tierstore.tracing.events import Ours, ScopeEnd, Unpack
from tierstore.tracing.events import Pack as PackEvent
from tierstore.tracing.reader import RecordedTrace, read_trace

SIDE = 64
NBYTES = SIDE * SIDE * 4

Forward = Callable[[torch.Tensor], tuple[torch.Tensor, object]]
"""Gives the loss, and what is to live until forward has ended."""


@pytest.fixture(params=[0, NBYTES, 2**30], ids=["no room", "room for one", "room for all"])
def store(request: pytest.FixtureRequest, make_store: MakeStore) -> TierStore:
    return make_store(host_bytes=request.param, staging_bytes=4 * NBYTES)


def recorded(store: TierStore, file: Path, forward: Forward) -> RecordedTrace:
    """The trace of one step, whose input is a constant that its caller holds throughout."""
    batch = torch.rand(SIDE, SIDE)
    with tiered_offload(store, min_bytes=0, trace=file):
        loss, kept = forward(batch)
    del kept
    loss.backward()
    del loss
    store.close()
    return read_trace(file)


def chain(batch: torch.Tensor) -> tuple[torch.Tensor, object]:
    """Saves the input, then four results of which the second is kept until forward has ended."""
    weight = torch.ones(SIDE, SIDE, requires_grad=True)
    link = (weight * batch).exp()
    kept = link = (-link).exp()
    for _ in range(2):
        link = (-link).exp()
    return (-link).sum(), kept


def times_of(trace: RecordedTrace, kind: type[Ours]) -> dict[int, int]:
    events = [event for event in trace.events if isinstance(event, kind)]
    assert len({event.index for event in events}) == len(events), "each once"
    return {event.index: event.at_ns for event in events}


def test_ours_is_told_when_others_let_go_and_never_of_what_they_hold(store: TierStore, tmp_path: Path) -> None:
    trace = recorded(store, tmp_path / "step.jsonl", chain)
    packs = {event.index: event for event in trace.events if isinstance(event, PackEvent)}
    (scope_end,) = [event.at_ns for event in trace.events if isinstance(event, ScopeEnd)]
    backward_ns = min(event.began_ns for event in trace.events if isinstance(event, Unpack))
    seen = times_of(trace, Ours)
    assert sorted(packs) == [0, 1, 2, 3, 4]
    assert sorted(seen) == [1, 2, 3, 4], "the input is its caller's to the end"
    assert packs[2].end_ns < seen[1] < packs[3].began_ns, "it is let go of when the next result takes its name"
    assert scope_end < seen[2] < backward_ns
    assert packs[4].end_ns < seen[3] < scope_end
    assert packs[4].end_ns < seen[4] < scope_end, "forward has returned, and let go of it"


def test_ours_of_views_is_told_when_the_last_of_them_is_let_go_of(store: TierStore, tmp_path: Path) -> None:
    def split(batch: torch.Tensor) -> tuple[torch.Tensor, object]:
        wide = torch.ones(SIDE, 2 * SIDE, requires_grad=True) * 2
        left, right = wide.chunk(2, -1)
        loss = (left * left).sum() + (right * right).sum()
        del left, wide
        return loss + (batch * loss).exp().sum(), right

    trace = recorded(store, tmp_path / "step.jsonl", split)
    (scope_end,) = [event.at_ns for event in trace.events if isinstance(event, ScopeEnd)]
    packs = {event.index: event for event in trace.events if isinstance(event, PackEvent)}
    views = [index for index, pack in packs.items() if pack.storage_bytes == 2 * NBYTES]
    assert len(views) == 4
    seen = times_of(trace, Ours)
    assert all(scope_end < seen[index] for index in views)

"""A recorded step becomes a workload, without what the store did to it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tierstore.errors import ConfigError
from tierstore.simulator import (
    Action,
    Compute,
    EndScope,
    LetGo,
    Pack,
    Release,
    Unpack,
    Workload,
)
from tierstore.simulator.from_trace import workload_of
from tierstore.tracing import events
from tierstore.tracing.reader import RecordedTrace
from tierstore.tracing.steps import steps_of

_SECOND = 1_000_000_000
_THREAD = 7


def _pack(
    at: int, index: int, ended: int | None = None, storage: int | None = None, device: str = "cpu"
) -> events.Pack:
    root = index if storage is None else storage
    began_ns, end_ns = at * _SECOND, (at if ended is None else ended) * _SECOND
    return events.Pack(
        began_ns, end_ns, _THREAD, 0, 0, index, index, None, index, root, 0, 1000 + root, 1, "float32", device, (1,)
    )


def _unpack(at: int, index: int, ended: int) -> events.Unpack:
    return events.Unpack(at * _SECOND, ended * _SECOND, _THREAD, 0, index)


def _trace(*seen: events.Event, device_bytes: int = 0) -> RecordedTrace:
    settings = events.StoreSettings("/x", False, 0, 0, 0, "none", 0, True, "buffered")
    header = events.Header(events.FORMAT, events.VERSION, 0, 0.0, 1, settings, events.Machine("x", 12, 0, {}))
    scope: list[events.Event] = [
        events.Scope(0, _THREAD, "main", 0, 0, device_bytes, "learned", 0, False),
        events.ScopeEnd(10 * _SECOND, _THREAD, 0, False),
    ]
    return RecordedTrace(header, [*scope, *seen], is_complete=True)


def _workload(*seen: events.Event, device_bytes: int = 0) -> Workload:
    trace = _trace(*seen, device_bytes=device_bytes)
    return workload_of(trace, steps_of(trace)[0])


def _typed(actions: Iterable[Action]) -> list[tuple[type[Action], Action]]:
    """Actions of different kinds are equal, as tuples."""
    return [(type(action), action) for action in actions]


_FORWARD = (_pack(1, 0), _pack(3, 1, ended=6), _pack(8, 2, storage=1))
_BACKWARD = (
    _unpack(12, 1, 17),
    events.Release(18 * _SECOND, 0, 1),
    _unpack(19, 0, 19),
    events.Release(20 * _SECOND, 0, 0),
    events.Release(20 * _SECOND, 0, 2),
    events.Gone(21 * _SECOND, 0),
)


def test_workload_of_step_has_gaps_as_compute_and_no_waits() -> None:
    stalls = (
        events.Stall(4 * _SECOND, 6 * _SECOND, _THREAD, "pack waits for budget", None),
        events.Stall(13 * _SECOND, 17 * _SECOND, _THREAD, "unpack waits for restore", 1),
        events.Stall(0, 20 * _SECOND, _THREAD + 1, "unpack waits for restore", 1),
    )
    expected: list[Action] = [
        Compute(1), Pack(0), Compute(3), Pack(1), Compute(2), Pack(2), Compute(2), EndScope(),
        Compute(3), Unpack(1), Compute(1), Release(1), Compute(1), Unpack(0), Compute(1), Release(0), Release(2),
        Compute(1),
    ]  # fmt: skip
    workload = _workload(*_FORWARD, *_BACKWARD, *stalls)
    assert _typed(workload.actions) == _typed(expected)
    assert workload.training_cores == 12
    views = [(each.nbytes, each.record, each.kind) for each in workload.saved]
    assert views == [(1000, None, "float32"), (1001, None, "float32"), (1001, 1, "float32")]


def test_workload_of_step_has_storage_let_go_of_when_it_is_seen_after_its_last_view() -> None:
    seen = (
        events.Ours(4 * _SECOND, 0, 0),
        events.Ours(7 * _SECOND, 0, 1),
        events.Ours(9 * _SECOND, 0, 2),
        events.Ours(11 * _SECOND, 0, 1),
    )
    early = _workload(*_FORWARD, *_BACKWARD, *seen[:2])
    assert [saved.is_shared for saved in early.saved] == [False, True, True], (
        "a view was packed after the store was its sole owner"
    )
    workload = _workload(*_FORWARD, *_BACKWARD, *seen)
    assert [saved.is_shared for saved in workload.saved] == [False, False, False]
    others = [(type(action), *action) for action in workload.actions if not isinstance(action, Compute | Unpack)]
    assert others == [
        (Pack, 0), (Pack, 1), (LetGo, 0), (Pack, 2), (EndScope,), (LetGo, 1), (Release, 1), (Release, 0), (Release, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (_FORWARD, "from its forward to its end"),
        ((*_FORWARD, *_BACKWARD[:-1]), "from its forward to its end"),
        ((_FORWARD[0], _FORWARD[2], *_BACKWARD), "events are missing"),
    ],
    ids=["no backward", "not gone", "pack lost"],
)
def test_workload_of_step_that_cannot_be_simulated_is_refused(seen: tuple[events.Event, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _workload(*seen)


@pytest.mark.parametrize(("device_bytes", "staying"), [(0, []), (1001, []), (1002, [2]), (2002, [2]), (2003, [1, 2])])
def test_workload_of_step_on_an_accelerator_is_without_what_may_stay_there(
    device_bytes: int, staying: list[int]
) -> None:
    packs = (_pack(1, 0), _pack(3, 1, device="cuda:0"), _pack(8, 2, device="cuda:1"))
    seen = [events.Ours(9 * _SECOND, 0, index) for index in range(3)]
    workload = _workload(*packs, *_BACKWARD, *seen, device_bytes=device_bytes)
    assert [index for index, saved in enumerate(workload.saved) if saved.is_shared] == staying

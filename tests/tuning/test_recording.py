"""How long steps took, from the events of a trace."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tierstore.errors import ConfigError
from tierstore.tracing.events import (
    FORMAT,
    VERSION,
    Computed,
    Event,
    Gone,
    Header,
    Machine,
    Pack,
    Release,
    Scope,
    ScopeEnd,
    StoreSettings,
    Unpack,
)
from tierstore.tracing.reader import RecordedTrace
from tierstore.tuning.recording import ProgramRecording, step_seconds_of

_SECOND = 1_000_000_000


def _graph(number: int, began: float, ended: float, nbytes: int = 1000, device: str = "cpu") -> list[Event]:
    """A graph of one saved tensor; forward takes a tenth of a second."""
    at, end = round(began * _SECOND), round(ended * _SECOND)
    pack = Pack(at + 1, at + 2, 7, number, number, 0, number, number, 0, 0, 0, nbytes, 1, "float32", device, (1,))
    return [
        Scope(at, 7, "main", number, 0, 0, "learned", 99, False),
        pack,
        ScopeEnd(at + _SECOND // 10, 7, number, False),
        Unpack(end - 3, end - 2, 7, number, 0),
        Release(end - 1, number, 0),
        Gone(end, number),
    ]


def _trace(*graphs: list[Event], codec: str | None = "none", io_depth: int | None = None) -> RecordedTrace:
    settings = StoreSettings("/x", False, 60, 39, 0, codec, 0, True, "buffered", io_depth)
    header = Header(FORMAT, VERSION, 0, 0.0, 1, settings, Machine("x", 12, 0, {}))
    return RecordedTrace(header, [event for graph in graphs for event in graph], is_complete=True)


def _steps(*ends: float, sizes: Sequence[int] = (1000,)) -> RecordedTrace:
    """Graphs that are gone then, of these sizes in turn."""
    graphs = [_graph(number, end - 0.5, end, sizes[number % len(sizes)]) for number, end in enumerate(ends)]
    return _trace(*graphs)


@pytest.mark.parametrize(
    ("traces", "seconds"),
    [
        pytest.param([_steps(5, 9, 10, 11, 13)], 1.0, id="from end to end, without the first two"),
        pytest.param(
            [_steps(4, 5, 6, 10, 11, 12, 16, 17, 18, 22, 23, sizes=(2000, 1000, 1000))], 2.0, id="two models in turn"
        ),
        pytest.param([_steps(end) for end in (1, 2, 4, 6)], 2.0, id="a store for each step"),
        pytest.param([_steps(1, 2)], None, id="too few steps"),
        pytest.param([_trace()], None, id="no step"),
    ],
)
def test_step_seconds_of_a_process(traces: list[RecordedTrace], seconds: float | None) -> None:
    assert step_seconds_of(traces) == (None if seconds is None else pytest.approx(seconds))


def _of_scope(io_depth: int | None = None, **changes: object) -> ProgramRecording:
    scope, *rest = _graph(0, 0, 1)
    return ProgramRecording(_trace([msgspec.structs.replace(scope, **changes), *rest], io_depth=io_depth), 1.0)


def test_settings_are_those_of_the_trace_and_the_distance_of_the_default_is_none() -> None:
    settings = _of_scope().settings
    assert (settings.host_bytes, settings.staging_bytes, settings.codec) == (60, 39, "none")
    assert (settings.lookahead_bytes, settings.io_depth) == (None, 4)
    assert _of_scope(io_depth=9).settings.io_depth == 9
    settings = _of_scope(prefetch="none", lookahead_bytes=0).settings
    assert (settings.prefetch, settings.lookahead_bytes) == ("none", None)


def test_settings_of_a_daemon_s_store_or_a_trace_without_packs_are_refused() -> None:
    with pytest.raises(ConfigError, match="daemon"):
        _ = ProgramRecording(_trace(_graph(0, 0, 1), codec=None), 1.0).settings
    with pytest.raises(ConfigError, match="no saved tensor"):
        _ = ProgramRecording(_trace(_graph(0, 0, 1)[:1]), 1.0).settings


def _on_device(number: int, *, told: float) -> list[Event]:
    """The host is through with it in 0.2 of a second; its accelerator is not, and says so then."""
    graph = _graph(number, number * 6.0, number * 6.0 + 0.2, device="cuda:0")
    return [*graph, Computed(round(told * _SECOND), number, 2.0, 0.5, 900, 3.0, 0.0, 900)]


def test_step_seconds_on_an_accelerator_are_by_what_that_is_through_with() -> None:
    graphs = [_on_device(number, told=number * 6.0 + 5.5 + (number == 2)) for number in range(5)]
    assert step_seconds_of([_trace(*graphs)]) == pytest.approx(6.0)
    assert step_seconds_of([_trace(*graphs[:3])]) == pytest.approx(7.0), "of the third alone"

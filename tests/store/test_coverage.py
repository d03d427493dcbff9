"""What of a graph has to stay on an accelerator, found from times; which are made up here."""

from types import SimpleNamespace

import pytest
import torch

from tests.device.timed import TimedDevice
from tierstore.ledger.coverage import Coverage, Measurable, Measured
from tierstore.residency import graph_times
from tierstore.residency.graph_times import GraphTimes


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The host's time, which stands still: `clock.seconds`."""
    host = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(graph_times, "perf_counter", lambda: host.seconds)
    return host


def _measured(forward_wait: float = 0.0, backward_wait: float = 0.0) -> Measured:
    return Measured(10.0, forward_wait, 1000, 20.0, backward_wait, 800)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (_measured(), 0),
        (_measured(forward_wait=4.0), 400),
        (_measured(backward_wait=10.0), 400),
        (_measured(forward_wait=1.0, backward_wait=10.0), 400),
        (_measured(forward_wait=0.1, backward_wait=0.2), 0),
        (Measured(0.0, 0.0, 0, 0.0, 0.0, 0), 0),
    ],
    ids=["nothing waits", "forward", "backward", "the worse one decides", "noise", "no time at all"],
)
def test_uncovered_bytes_are_the_share_of_the_link_that_was_waited_for(measured: Measured, expected: int) -> None:
    assert measured.uncovered_bytes() == expected


def _times_on(engine: TimedDevice) -> GraphTimes:
    return GraphTimes(engine, torch.device("cpu"), engine.compute, 0)


def _wait(times: GraphTimes, engine: TimedDevice, seconds: float) -> None:
    """Computing waits for something."""
    times.waits(engine.compute, lambda: engine.computes(seconds))


def test_measured_is_what_was_waited_for_and_copied_in_forward_and_in_backward() -> None:
    engine = TimedDevice(1.0)
    engine.computes(3)
    times = _times_on(engine)
    engine.computes(10)
    times.copies_out(1000)
    times.copies_in(7)  # of what backward of another graph asks for
    _wait(times, engine, 4)
    times.asked_for(engine.compute)
    times.copies_out(7)  # of what has not left by now
    times.copies_in(800)
    _wait(times, engine, 2)
    engine.computes(20)
    times.asked_for(engine.compute)
    _wait(times, engine, 8)
    engine.computes(5)  # after its last unpack
    engine.synchronize()
    assert times.measured() == Measured(14, 4, 1000, 30, 10, 800)


def test_measured_what_the_host_takes_to_queue_a_wait_is_not_waited_for(clock: SimpleNamespace) -> None:
    """The device has nothing to do until the host has queued the second mark."""
    engine = TimedDevice(1.0)
    times = _times_on(engine)

    def wait(seconds: float) -> None:
        clock.seconds += 3
        engine.computes(max(3, seconds))

    times.waits(engine.compute, lambda: wait(0))
    times.waits(engine.compute, lambda: wait(5))
    engine.computes(100)
    times.asked_for(engine.compute)
    times.waits(engine.compute, lambda: wait(2))
    engine.computes(100)
    times.asked_for(engine.compute)
    engine.synchronize()
    assert times.measured() == Measured(108, 2, 0, 103, 0, 0)


def test_times_are_over_when_the_last_mark_is() -> None:
    engine = TimedDevice(1.0)
    side = type(engine.compute)()
    times = _times_on(engine)
    engine.computes(10)
    times.asked_for(engine.compute)
    engine.computes(20)
    times.asked_for(engine.compute)
    assert not times.is_over()
    engine.host_seconds = 29
    assert not times.is_over()
    engine.host_seconds = 30
    assert times.is_over()
    times.waits(side, lambda: side.comes_to(40))  # on a stream that asks for nothing else
    assert not times.is_over()
    engine.host_seconds = 40
    assert times.is_over()


def test_times_of_a_graph_that_backward_asks_nothing_of_tell_nothing() -> None:
    engine = TimedDevice(1.0)
    times = _times_on(engine)
    _wait(times, engine, 4)
    engine.synchronize()
    assert times.is_over()
    assert times.measured() is None


def _note(
    coverage: Coverage, graph: Measurable, staying_bytes: int, uncovered_bytes: int = 0, refused_bytes: int = 0
) -> int:
    """A step of the graph has ended. Returns what stays in the next one."""
    measured = SimpleNamespace(uncovered_bytes=lambda: uncovered_bytes)
    times = SimpleNamespace(
        staying_bytes=staying_bytes,
        refused_bytes=refused_bytes,
        end=lambda: None,
        is_over=lambda: True,
        measured=lambda: measured,
        spare_bytes=lambda: None,
    )
    coverage.note(graph, times)
    return coverage.staying_bytes(graph)


def test_refused_copies_back_are_no_waits_for_the_link_and_less_stays_for_good() -> None:
    """Compute waits in that step, too: for the host, and not for the link."""
    coverage, graph = Coverage(), Measurable(1, 2, 1000)
    assert _note(coverage, graph, 0, uncovered_bytes=800) == 800
    assert _note(coverage, graph, 800, uncovered_bytes=100, refused_bytes=10) == 600
    assert _note(coverage, graph, 800, refused_bytes=10) == 600, "a step that was on its way shrinks it once more"
    assert _note(coverage, graph, 600, uncovered_bytes=100) == 600
    assert _note(coverage, graph, 600, uncovered_bytes=100, refused_bytes=500) == 100
    assert _note(coverage, graph, 100, refused_bytes=500) == 0


def test_refusal_holds_for_graphs_of_the_same_nodes_and_for_no_other() -> None:
    coverage, graph, longer = Coverage(), Measurable(1, 2, 1000), Measurable(3, 2, 2000)
    other = Measurable(4, 5, 1000)
    for each in (graph, other):
        assert _note(coverage, each, 0, uncovered_bytes=800) == 800
    assert coverage.staying_bytes(longer) == coverage.staying_bytes(graph, 2) == 1600
    found = coverage.num_found()
    _note(coverage, longer, 1600, refused_bytes=10)
    assert coverage.num_found() == found + 1, "plans are not made anew"
    assert coverage.staying_bytes(longer) == coverage.staying_bytes(graph, 2) == 1200
    assert coverage.staying_bytes(graph) == coverage.staying_bytes(other) == 800


def test_once_nothing_changes_few_steps_are_marked_until_something_does() -> None:
    coverage, graph = Coverage(), Measurable(1, 2, 1000)

    def steps(number: int, staying_bytes: int, uncovered_bytes: int = 0) -> int:
        """How many of so many steps are marked."""
        num_marked = 0
        for _ in range(number):
            if coverage.is_to_be_marked(graph):
                num_marked += 1
                _note(coverage, graph, staying_bytes, uncovered_bytes)
        return num_marked

    assert steps(1, 0, uncovered_bytes=100) == 1
    assert steps(3, 100) == 3
    assert 1 <= steps(100, 100) <= 1 + 100 // 30
    while not coverage.is_to_be_marked(graph):
        pass
    _note(coverage, graph, 100, uncovered_bytes=50)
    assert coverage.staying_bytes(graph) == 150
    assert steps(2, 150) == 2
    _note(coverage, graph, 150, refused_bytes=10)
    assert steps(3, 100) == 3


def test_step_without_marks_tells_nothing_but_what_was_refused() -> None:
    engine = TimedDevice(1.0)
    times = GraphTimes(engine, torch.device("cpu"), engine.compute, 0, is_marked=False)
    _wait(times, engine, 4)
    times.asked_for(engine.compute)
    _wait(times, engine, 4)
    assert engine.compute.seconds == 8
    assert (engine.num_marks, times.is_over(), times.measured()) == (0, True, None)
    times.refused(7)
    assert times.refused_bytes == 7


def test_refusals_of_a_step_are_known_before_the_device_has_come_to_its_end() -> None:
    engine = TimedDevice(1.0)
    times = _times_on(engine)
    engine.computes(10)
    times.asked_for(engine.compute)
    times.refused(7)
    times.refused(3)
    assert times.is_over()
    assert times.refused_bytes == 7

"""How much of one session's writes is queued at once: the rule alone, and in a daemon."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon import wire
from tests.daemon.clients import client_of
from tests.daemon.conftest import DaemonProcess, StartDaemon
from tierstore.commands.views import decode_report
from tierstore.daemon.report import SessionState
from tierstore.daemon.sessions import WriteQueue
from tierstore.sidecar.window import SharedSlab

MIB = 2**20
NUM_WRITES = 24


@settings(deadline=None)
@given(st.integers(0, 100), st.lists(st.integers(0, 150), max_size=40), st.data())
def test_writes_start_in_order_within_the_quota_and_all_of_them(
    most_bytes: int, sizes: list[int], data: st.DataObject
) -> None:
    queue, started, running = WriteQueue(most_bytes), list[int](), list[int]()

    def start(number: int) -> None:
        started.append(number)
        running.append(sizes[number])

    left = list(range(len(sizes)))
    while left or running:
        if left and (not running or data.draw(st.booleans())):
            number = left.pop(0)
            queue.add(sizes[number], lambda number=number: start(number))
        else:
            queue.end(running.pop(data.draw(st.integers(0, len(running) - 1))))
        assert queue.queued_bytes == sum(running)
        assert queue.queued_bytes <= most_bytes or sum(size > 0 for size in running) == 1
        assert queue.held_bytes == sum(sizes) - sum(sizes[number] for number in [*started, *left])
        assert running or not queue.held_bytes, "something always goes on"
    assert started == list(range(len(sizes)))


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    return start_daemon(session_queued_bytes="2MiB", metrics="127.0.0.1:0", codec="none")


def state_of(message: object) -> SessionState:
    assert isinstance(message, wire.Report)
    (session,) = decode_report(message.state, "here").sessions
    return session


def write_of(number: int, num_bytes: int = MIB) -> wire.Write:
    return wire.Write(number, number, 1, 0, num_bytes, "uint8", 1, "")


def test_writes_beyond_the_quota_wait_and_reads_and_discards_do_not(daemon: DaemonProcess, slab: SharedSlab) -> None:
    with client_of(daemon) as client:
        client.open(slab)
        client.send(write_of(1), write_of(2))
        assert {type(client.receive()), type(client.receive())} == {wire.Stored}
        writes = [write_of(number) for number in range(10, 10 + NUM_WRITES)]
        # One frame, so that the report is made before any of these writes can end.
        client.send(*writes, wire.Read(100, 1, 1, 2 * MIB, MIB), wire.Discard(101, (2,)), wire.Inspect())
        answers = [client.receive() for _ in range(NUM_WRITES + 3)]
        session = state_of(next(each for each in answers if isinstance(each, wire.Report)))
        assert (session.queued_bytes, session.queued_quota_bytes) == (2 * MIB, 2 * MIB)
        assert session.held_bytes == (NUM_WRITES - 2) * MIB
        assert session.num_jobs == NUM_WRITES + 1
        stored = [each.request for each in answers if isinstance(each, wire.Stored)]
        assert sorted(stored) == list(range(10, 10 + NUM_WRITES)), "slowed, not failed"
        for kind in (wire.Loaded, wire.Gone):
            assert any(isinstance(each, kind) for each in answers[: NUM_WRITES * 3 // 4]), (
                f"{kind} waited for the writes"
            )
        client.send(wire.Inspect())
        session = state_of(client.receive())
        assert (session.queued_bytes, session.held_bytes) == (0, 0)


def test_discard_of_a_write_that_is_held_back_waits_for_it(daemon: DaemonProcess, slab: SharedSlab) -> None:
    with client_of(daemon) as client:
        client.open(slab)
        client.send(*(write_of(number) for number in range(1, 7)), wire.Discard(100, (6,)))
        requests = [client.receive().request for _ in range(7)]  # type: ignore[union-attr]
        assert requests.index(100) > requests.index(6), "the write before may end after both"
        client.send(wire.Inspect())
        assert state_of(client.receive()).num_records == 5

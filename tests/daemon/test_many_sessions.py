"""Very many sessions, and clients that ask for reports without end: nobody else notices."""

from contextlib import ExitStack

import pytest

from tests.daemon import wire
from tests.daemon.clients import RawClient, ask, client_of, page_of
from tests.daemon.conftest import DaemonProcess, StartDaemon
from tierstore import TierStore
from tierstore.commands.views import decode_report
from tierstore.errors import DaemonUnavailableError

NUM_SESSIONS = 300
NUM_ROUNDS = 10


def leave_sessions(daemon: DaemonProcess, number: int) -> None:
    for _ in range(number):
        with client_of(daemon) as client:
            client.open()


def test_reports_are_shared_and_neighbours_have_their_turns(start_daemon: StartDaemon) -> None:
    """Four clients repeat `Inspect`: each question is answered, with fewer reports than questions."""
    daemon = start_daemon(metrics="127.0.0.1:0", log_level="error")
    leave_sessions(daemon, NUM_SESSIONS)
    address = page_of(daemon)
    with ExitStack() as stack:
        askers = [stack.enter_context(client_of(daemon)) for _ in range(4)]
        neighbour = stack.enter_context(client_of(daemon))
        neighbour.open()
        for asker in askers:
            asker.greet()
        states = []
        for number in range(NUM_ROUNDS):
            for asker in askers:
                asker.send(wire.Inspect())
            for request in range(3):  # it is served while the reports are made
                neighbour.send(wire.Discard(3 * number + request, (1,)))
                assert neighbour.receive() == wire.Gone(3 * number + request)
            answers = [asker.receive() for asker in askers]
            states += [answer.state for answer in answers if isinstance(answer, wire.Report)]
    assert len(states) == 4 * NUM_ROUNDS, "each question is answered"
    assert len(set(states)) <= 2 * NUM_ROUNDS, "and all who wait for one report get the same bytes"
    report = decode_report(states[-1], "here")
    assert report.num_sessions == len(report.sessions) == NUM_SESSIONS + 1
    assert ask(address, "/metrics").text.count("\ntierstore_quota_bytes{") >= NUM_SESSIONS, (
        "the page tells of the same sessions"
    )


def test_sessions_of_one_user_are_bounded(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(max_sessions_per_user=3, grace_seconds=1000)
    leave_sessions(daemon, 2)
    with ExitStack() as stack:
        client = stack.enter_context(client_of(daemon))
        client.open()
        with client_of(daemon) as refused:
            refused.greet()
            refused.send(wire.Open("one more", None, 1))
            assert refused.is_refused("has 3 sessions", "--max-sessions-per-user is 3", "1000 s")
        with pytest.raises(DaemonUnavailableError, match="--max-sessions-per-user is 3"):
            TierStore.connect(daemon.socket)
        client.end()
    with client_of(daemon) as client:
        client.open()
    assert daemon.stop() == 0
    again = start_daemon(daemon.path, daemon.socket, max_sessions_per_user=3)
    with client_of(again) as refused:
        refused.greet()
        refused.send(wire.Open("one more", None, 1))
        assert refused.is_refused("has 3 sessions"), "those that were found again count"


def test_sessions_that_are_opened_at_once_are_counted_before_they_are_open(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(max_sessions_per_user=5)
    with ExitStack() as stack:
        clients: list[RawClient] = [stack.enter_context(client_of(daemon)) for _ in range(20)]
        for client in clients:
            client.greet()
        for client in clients:
            client.send(wire.Open("crowd", None, 1))
        answers = [client.receive() for client in clients]
        assert sum(isinstance(answer, wire.Opened) for answer in answers) == 5
        assert sum(isinstance(answer, wire.Refused) for answer in answers) == 15

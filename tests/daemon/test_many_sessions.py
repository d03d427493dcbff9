"""Sessions of one user are bounded."""

from contextlib import ExitStack

import pytest

from tests.daemon import wire
from tests.daemon.clients import RawClient, client_of
from tests.daemon.conftest import DaemonProcess, StartDaemon
from tierstore import TierStore
from tierstore.errors import DaemonUnavailableError


def leave_sessions(daemon: DaemonProcess, number: int) -> None:
    for _ in range(number):
        with client_of(daemon) as client:
            client.open()


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

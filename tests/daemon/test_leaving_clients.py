"""Clients that leave at the worst moment: the daemon keeps nothing of theirs for longer than the grace period."""

import os
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.daemon import wire
from tests.daemon.clients import RawClient, report_of
from tests.daemon.conftest import DaemonProcess, StartDaemon
from tests.waiting import until
from tierstore.sidecar.window import SharedSlab

SLAB_BYTES = 4 * 2**20


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    return start_daemon(grace_seconds=0.3, codec="zstd:19")  # which takes a second for the slab


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[RawClient]:
    client = RawClient(daemon)
    yield client
    client.socket.close()


@pytest.fixture
def slab() -> Iterator[SharedSlab]:
    slab = SharedSlab(1, SLAB_BYTES)
    slab.memory[:] = bytes(each & 0x0F for each in os.urandom(SLAB_BYTES // 16)) * 16
    yield slab
    slab.close()


def begin_slow_write(client: RawClient, slab: SharedSlab) -> wire.Opened:
    opened = client.open(slab)
    client.send(wire.Write(1, 1, 1, 0, SLAB_BYTES, "", 1, ""))
    return opened


def test_daemon_that_ends_starts_no_grace_period(start_daemon: StartDaemon) -> None:
    """With none at all it would end the sessions of the clients that it leaves, when nothing of it runs any more."""
    daemon = start_daemon(grace_seconds=0)
    clients = [RawClient(daemon) for _ in range(20)]
    for client in clients:
        client.open()
    assert daemon.stop() == 0
    assert "ending" in daemon.log
    assert "Traceback" not in daemon.log
    assert "never awaited" not in daemon.log
    for client in clients:
        client.socket.close()
    again = start_daemon(daemon.path, daemon.socket, grace_seconds=1000)
    assert report_of(again).num_sessions == len(clients), "they may come back"


def wait_until_nothing_is_left(daemon: DaemonProcess, num_opened: int = 1) -> None:
    def is_empty() -> bool:
        report = report_of(daemon)
        return (report.num_sessions, report.disk.disk_bytes, report.num_sessions_opened) == (0, 0, num_opened)

    until(is_empty)  # the lease ends by the daemon's own clock


def test_client_leaves_while_its_session_is_opened_nothing_is_left(daemon: DaemonProcess) -> None:
    for _ in range(5):
        client = RawClient(daemon)
        client.greet()
        client.send(wire.Open("hasty", None, 1))
        client.socket.close()
    wait_until_nothing_is_left(daemon, num_opened=5)


def test_client_leaves_while_its_session_is_resumed_nothing_is_left(
    daemon: DaemonProcess, client: RawClient, slab: SharedSlab
) -> None:
    """It waits for the jobs of the connection before (rule 4) when it goes."""
    opened = begin_slow_write(client, slab)
    again = RawClient(daemon)
    again.greet()
    again.send(wire.Resume(opened.session, opened.token))
    again.socket.close()
    client.socket.close()  # the daemon may see that the other one left first, and then this one keeps the session
    wait_until_nothing_is_left(daemon)


def test_client_resumes_again_before_it_was_answered_only_the_last_connection_counts(
    daemon: DaemonProcess, client: RawClient, slab: SharedSlab
) -> None:
    opened = begin_slow_write(client, slab)
    crowd = [RawClient(daemon) for _ in range(4)]
    for before, each in pairwise([client, *crowd]):
        each.greet()
        each.send(wire.Resume(opened.session, opened.token))
        assert before.receive() is None, "cut off, as soon as the next one has the session"
    assert crowd[-1].receive() == wire.Resumed()
    crowd[-1].share(slab)
    crowd[-1].send(wire.Read(2, 1, 1, 0, SLAB_BYTES))
    assert isinstance(crowd[-1].receive(), wire.Loaded)
    for each in crowd:
        each.socket.close()
    wait_until_nothing_is_left(daemon)


def test_key_written_twice_at_once_is_refused_and_nothing_is_left(
    daemon: DaemonProcess, client: RawClient, slab: SharedSlab
) -> None:
    """Both would be stored, and only one of them freed."""
    begin_slow_write(client, slab)
    client.send(wire.Write(2, 1, 1, 0, SLAB_BYTES, "", 1, ""))
    assert client.is_refused("record 1", "being written")
    wait_until_nothing_is_left(daemon)


def test_discards_that_all_wait_for_one_job_are_answered(
    daemon: DaemonProcess, client: RawClient, slab: SharedSlab
) -> None:
    begin_slow_write(client, slab)
    keys = tuple(range(1, wire.MAX_KEYS + 1))
    for number in range(200):
        client.send(wire.Discard(number, keys))
    client.expect(wire.Stored)
    assert sorted(client.expect(wire.Gone).request for _ in range(200)) == list(range(200))
    client.end()
    wait_until_nothing_is_left(daemon)

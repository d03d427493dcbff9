"""The six rules of the protocol in a real daemon and a real client, where they show: at slow jobs, lost connections.

Rules 1 and 2 are the disk tier's: `tests/store/test_commit_order.py`.
"""

import asyncio

import pytest

from tests.daemon import wire
from tests.daemon.clients import client_of, report_of
from tests.daemon.conftest import DaemonProcess, StartDaemon
from tests.daemon.peer import Peer, opened_disk
from tests.daemon.test_write_queue import state_of, write_of
from tests.waiting import until
from tierstore.disk.tier import Kind
from tierstore.errors import DaemonUnavailableError
from tierstore.sidecar.window import SharedSlab

MIB = 2**20


@pytest.fixture
def slow_daemon(start_daemon: StartDaemon) -> DaemonProcess:
    """A megabyte takes it hundreds of milliseconds, and other writes are held back meanwhile."""
    return start_daemon(codec="zstd:19", session_queued_bytes="1MiB")


async def test_slot_of_a_request_that_was_given_up_is_not_used_for_another(peer: Peer) -> None:
    plain = Kind("uint8", 1, "")
    async with opened_disk(peer, reconnect_seconds=0.0) as (disk, guest):
        writing = asyncio.ensure_future(disk.write(1, memoryview(bytes(10_000)), plain))
        first = await guest.expect(wire.Write)
        guest.leave()
        await (await peer.guest()).welcome(wire.Resume, wire.Refused("not now", False))
        with pytest.raises(DaemonUnavailableError):
            await writing
        writing = asyncio.ensure_future(disk.write(2, memoryview(bytes(10_000)), plain))
        guest = await peer.guest()
        await guest.welcome(wire.Resume, wire.Resumed())
        await guest.expect(wire.Slab)
        assert await guest.expect(wire.Write) == first, "it is still to be answered"
        second = await guest.expect(wire.Write)
        ranges = [range(each.offset, each.offset + each.num_bytes) for each in (first, second)]
        assert ranges[0].start >= ranges[1].stop or ranges[1].start >= ranges[0].stop
        await guest.say(*(wire.Stored(each.request, 4096, "none", "uint8", 1) for each in (first, second)))
        await writing
        assert (await guest.expect(wire.Discard)).keys == (first.key,), "nobody waited for it any more"


def test_resumed_only_when_the_jobs_of_the_lost_connection_have_ended(
    slow_daemon: DaemonProcess, slab: SharedSlab
) -> None:
    with client_of(slow_daemon) as client:
        opened = client.open(slab)
        client.send(*(write_of(number) for number in range(1, 4)), wire.Inspect())
        assert state_of(client.receive()).num_jobs == 3
    with client_of(slow_daemon) as client:
        client.resume(opened)
        client.send(wire.Inspect())
        session = state_of(client.receive())
        assert (session.num_jobs, session.num_records) == (0, 1), "the other two had not begun"
        client.end()


def test_write_that_is_said_twice_is_stored_once(start_daemon: StartDaemon, slab: SharedSlab) -> None:
    daemon = start_daemon(codec="none")
    with client_of(daemon) as client:
        client.open(slab)
        answers = []
        for request in (1, 2):
            client.send(wire.Write(request, 5, 1, 0, MIB, "uint8", 1, ""))
            answers.append(client.receive())
        assert answers == [wire.Stored(request, MIB, "none", "uint8", answers[0].checksum) for request in (1, 2)]  # type: ignore[union-attr]
        report = report_of(daemon)
        assert (report.disk.num_records, report.disk.disk_bytes, report.totals.spilled_bytes) == (1, MIB, MIB)


def test_discard_waits_for_the_write_of_its_key(slow_daemon: DaemonProcess, slab: SharedSlab) -> None:
    with client_of(slow_daemon) as client:
        client.open(slab)
        client.send(write_of(1), wire.Discard(2, (1,)))
        assert [type(client.receive()) for _ in range(2)] == [wire.Stored, wire.Gone]
        report = report_of(slow_daemon)
        assert (report.disk.num_records, report.disk.disk_bytes) == (0, 0)


def test_end_of_a_session_waits_for_its_jobs(slow_daemon: DaemonProcess, slab: SharedSlab) -> None:
    with client_of(slow_daemon) as client:
        client.open(slab)
        client.send(write_of(1), write_of(2), wire.Inspect())
        assert state_of(client.receive()).num_jobs == 2
        client.send(wire.Close())
        answers = [client.receive()]
        while not isinstance(answers[-1], wire.Closed):
            answers.append(client.receive())
        report = report_of(slow_daemon)
        assert (report.jobs.writes.running, report.disk.num_records, report.disk.disk_bytes) == (0, 0, 0)


def test_lease_of_a_client_that_is_back_does_not_end(start_daemon: StartDaemon) -> None:
    """While it is there, that of another client begins and ends."""
    daemon = start_daemon(grace_seconds=1.5)
    with client_of(daemon) as client:
        client.greet()  # before its lease begins, which is short
        with client_of(daemon) as lost:
            opened = lost.open()
        until(lambda: not report_of(daemon).sessions[0].is_connected)  # the daemon has noticed
        client.send(wire.Resume(opened.session, opened.token))
        client.expect(wire.Resumed)
        with client_of(daemon) as other:
            other.open()
        until(lambda: len(report_of(daemon).sessions) == 1)  # the lease ends by the daemon's own clock
        sessions = report_of(daemon).sessions
        assert [(each.session, each.is_connected) for each in sessions] == [(opened.session, True)]


def test_write_that_found_no_room_counts_for_nothing(start_daemon: StartDaemon, slab: SharedSlab) -> None:
    daemon = start_daemon(codec="none", disk_bytes=2 * MIB, session_disk_bytes=64 * MIB)
    with client_of(daemon) as client:
        client.open(slab)
        client.send(write_of(1, MIB))
        client.expect(wire.Stored)
        client.send(write_of(2, 3 * MIB // 2), wire.Inspect())
        answers = [client.receive(), client.receive()]
        assert {type(each) for each in answers} == {wire.Full, wire.Report}
        client.send(wire.Inspect())
        session = state_of(client.receive())
        assert (session.disk_bytes, session.totals.full) == (MIB, 1)

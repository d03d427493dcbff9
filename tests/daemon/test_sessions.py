"""Sessions: how many a user has, and what is read of them after a kill: sound leases, whatever lies beside them."""

import asyncio
import io
from contextlib import ExitStack

import msgspec
import pytest
import torch

from tests.daemon import wire
from tests.daemon.clients import RawClient, client_of, report_of, sessions_of
from tests.daemon.conftest import DaemonProcess, StartDaemon
from tierstore import DaemonUnavailableError, TierStore
from tierstore.daemon.sessions import COUNTER, KEY_BITS, RecordCount, Session, new_lease
from tierstore.disk.budget import map_bytes_for
from tierstore.disk.file_layout import FOLDER_NAME
from tierstore.disk.index import Index, PutLease

LEASE, _ = new_lease(3, 0, "trainer", None, 1)
MOST = 2 ** (64 - KEY_BITS) - 1


def put_lease(daemon: DaemonProcess, number: int, blob: bytes) -> None:
    """Into its index; the daemon is killed for it."""
    daemon.kill()
    index = Index(io.FileIO(daemon.path / FOLDER_NAME / "index", "r+"), map_bytes_for(2**30))
    index.apply([PutLease(number, blob)])
    index.close()


def preset_counter(daemon: DaemonProcess, number: int) -> None:
    """As if so many sessions had been opened."""
    put_lease(daemon, COUNTER, msgspec.msgpack.encode(number))


def test_session_with_the_highest_number_stores_and_survives(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    daemon.wait_until_open()
    preset_counter(daemon, MOST)
    daemon = start_daemon(daemon.path, daemon.socket, codec="none")
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        handle = store.put(torch.arange(1 << 17))
        store.flush()
        (session,) = report_of(daemon).sessions
        assert session.session == MOST
        daemon.kill()
        daemon = start_daemon(daemon.path, daemon.socket, codec="none")
        assert torch.equal(store.get(handle), torch.arange(1 << 17))


def test_numbers_begin_again_when_no_session_is_left(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    daemon.wait_until_open()
    preset_counter(daemon, MOST)
    daemon = start_daemon(daemon.path, daemon.socket)
    with client_of(daemon) as last:
        assert last.open().session == MOST
        for _ in range(2):
            with client_of(daemon) as refused:
                refused.greet()
                refused.send(wire.Open("test", None, 1))
                assert refused.is_refused("16777215 numbers", "when no session is left")
        last.end()
    with client_of(daemon) as first, client_of(daemon) as second:
        assert (first.open().session, second.open().session) == (1, 2)


async def test_wait_for_keys_ends_when_none_of_them_has_a_job() -> None:
    session, woken = Session(LEASE, 0, None, RecordCount(1), None), list[str]()  # type: ignore[arg-type]

    async def wait(name: str, keys: frozenset[int] | None) -> None:
        await session.wait_for(keys)
        woken.append(name)

    async def settled() -> list[str]:
        for _ in range(5):
            await asyncio.sleep(0)
        return sorted(woken)

    for key in (1, 1, 2, 3):
        session.begin_job(key)
    async with asyncio.TaskGroup() as tasks:
        for name, keys in {"4": {4}, "1": {1}, "12": {1, 2}, "2 ": {2}}.items():
            tasks.create_task(wait(name, frozenset(keys)))
        tasks.create_task(wait("all", None))
        assert await settled() == ["4"]
        session.end_job(1)
        assert await settled() == ["4"]
        session.end_job(1)
        session.begin_job(1)  # before those who waited have run
        assert await settled() == ["4"]
        session.end_job(2)
        assert await settled() == ["2 ", "4"]
        session.end_job(1)
        assert await settled() == ["1", "12", "2 ", "4"]
        session.end_job(3)
    assert sorted(woken) == ["1", "12", "2 ", "4", "all"]
    assert session.num_jobs == 0


def test_daemon_with_a_damaged_lease_starts_without_it(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with TierStore.connect(daemon.socket, host_bytes=0, reconnect_seconds=1, name="kept") as kept:
        handle = kept.put(torch.arange(1 << 17))
        kept.flush()
        with TierStore.connect(daemon.socket, host_bytes=0, reconnect_seconds=1, name="lost") as lost:
            lost_handle = lost.put(torch.ones(1 << 17))
            lost.flush()
            put_lease(daemon, 2, b"damaged")
            daemon = start_daemon(daemon.path, daemon.socket)
            assert sessions_of(daemon).keys() == {"kept"}
            assert "a damaged session was dropped" in daemon.log
            with pytest.raises(DaemonUnavailableError, match="is lost"):
                lost.get(lost_handle)
        assert torch.equal(kept.get(handle), torch.arange(1 << 17))


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

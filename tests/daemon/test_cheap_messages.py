"""What one client sends in plenty costs the others little, and the daemon a bounded amount of memory."""

import asyncio
import os
import socket
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon import wire
from tests.daemon.clients import LONG_SECONDS, RawClient, client_of, report_of
from tests.daemon.conftest import DaemonProcess, StartDaemon
from tests.waiting import until
from tierstore.base.threads import start_thread
from tierstore.daemon.limits import MOST_IN_ALL_BYTES, MOST_OF_SESSION_BYTES, MOST_OF_USER_BYTES, Unsent, Waiting
from tierstore.daemon.sessions import Session
from tierstore.daemon.turns import _REST_SECONDS, MOST_IN_TURN, Client, Turn, Turns
from tierstore.sidecar.channel import Channel, Pace
from tierstore.sidecar.window import SharedSlab
from tierstore.testing import FaultPlan, Latency, Rule

MIB = 2**20
NEIGHBOUR, CROWD = 1, 2
"""Users."""


class Listener:
    """A client, and the daemon's end of its connection, which is heard in turns."""

    def __init__(self, turns: Turns, uid: int) -> None:
        ours, self.client = socket.socketpair()
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB)
        self.num_heard = 0
        self.is_answered = asyncio.Event()
        self.is_over = asyncio.Event()
        turn = Turn(uid, lambda most, ends_at: self.channel.take_turn(most, ends_at))
        pace = Pace(partial(turns.ask, turn), lambda num_bytes: None)
        self.channel = Channel(ours, wire.ClientMessage, "a client", self._hear, self._end, pace=pace)

    def _hear(self, message: Any) -> None:
        self.num_heard += 1
        self.is_answered.set()

    def _end(self, error: Exception | None) -> None:
        self.is_over.set()

    def close(self) -> None:
        self.channel.close()
        self.client.close()


FLOODS = {
    "frames without messages": wire.frame_of([]) * 2**15,
    "messages in few frames": wire.frame_of([wire.Unmap(1)] * 1500) * 6,
    "a message in each frame": wire.frame_of([wire.Unmap(1)]) * 6000,
}


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize(("neighbour", "num_floods"), [(NEIGHBOUR, 30), (CROWD, 3)], ids=["another", "the same user"])
async def test_neighbour_is_heard_before_the_flood_s_fourth_turn(flood: str, neighbour: int, num_floods: int) -> None:
    turns = Turns()
    crowd, quiet = [Listener(turns, CROWD) for _ in range(num_floods)], Listener(turns, neighbour)
    with ExitStack() as stack:
        for each in (*crowd, quiet):
            stack.callback(each.close)
        await _flood(turns, crowd, quiet, FLOODS[flood])


async def _flood(turns: Turns, crowd: list[Listener], quiet: Listener, flood: bytes) -> None:
    for each in crowd:
        each.client.sendall(flood)
    async with asyncio.timeout(LONG_SECONDS):
        while turns.num_taken < 10:
            await asyncio.sleep(0)
        for _ in range(20):
            before, num_heard = turns.num_taken, sum(each.num_heard for each in crowd)
            quiet.is_answered.clear()
            quiet.client.send(wire.frame_of([wire.Unmap(1)]))
            await quiet.is_answered.wait()
            assert turns.num_taken - before <= 4
            assert sum(each.num_heard for each in crowd) - num_heard <= 4 * MOST_IN_TURN


@pytest.mark.parametrize("state", ["heard", "held back", "does not read"])
async def test_of_a_client_that_is_gone_two_turns_are_heard_at_most(state: str) -> None:
    """What it has said would be heard for as long as a living one's, and by then nobody wants the answers."""
    turns = Turns()
    listener = Listener(turns, CROWD)
    with ExitStack() as stack:
        stack.callback(listener.close)
        if state == "held back":
            listener.channel.hold()
        elif state == "does not read":
            listener.channel.send_frame(wire.frame_of([wire.Report(bytes(2**19))]))
        listener.client.sendall(FLOODS["a message in each frame"])
        listener.client.close()
        async with asyncio.timeout(LONG_SECONDS):
            await listener.is_over.wait()
    assert turns.num_taken <= 2
    assert listener.num_heard <= 2 * MOST_IN_TURN


async def test_last_words_of_a_client_that_is_gone_are_heard() -> None:
    turns = Turns()
    listener = Listener(turns, CROWD)
    with ExitStack() as stack:
        stack.callback(listener.close)
        listener.channel.hold()
        listener.client.sendall(wire.frame_of([wire.Unmap(1)] * (MOST_IN_TURN - 3)))
        listener.client.close()
        async with asyncio.timeout(LONG_SECONDS):
            await listener.is_over.wait()
    assert listener.num_heard == MOST_IN_TURN - 3


async def test_users_get_the_same_share_however_many_connections_they_have() -> None:
    turns, loop = Turns(), asyncio.get_running_loop()
    taken = {NEIGHBOUR: 0, CROWD: 0}

    def endless(uid: int) -> Turn:
        def take(most: int, ends_at: float) -> int:
            taken[uid] += 1
            if turns.num_taken < 500:
                turns.ask(turn)
            return most

        turn = Turn(uid, take)
        return turn

    for uid in (NEIGHBOUR, *[CROWD] * 20):
        loop.call_soon(turns.ask, endless(uid))
    async with asyncio.timeout(LONG_SECONDS):
        while turns.num_taken < 500:
            await asyncio.sleep(0)
    assert 200 < taken[NEIGHBOUR] < 300, taken


async def test_jobs_have_the_interpreter_between_the_turns_of_a_flood() -> None:
    """Whatever the switch interval is: a job gives the interpreter's lock back and needs it again a dozen times."""
    turns, loop, before = Turns(), asyncio.get_running_loop(), sys.getswitchinterval()
    is_over = asyncio.Event()

    def take(most: int, ends_at: float) -> int:
        if turns.num_taken < 2000 and not is_over.is_set():
            turns.ask(turn)
        return most

    def job() -> None:
        for _ in range(50):
            os.sched_yield()
        loop.call_soon_threadsafe(is_over.set)

    turn = Turn(CROWD, take)
    turns.ask(Turn(NEIGHBOUR, lambda most, ends_at: 1))
    sys.setswitchinterval(LONG_SECONDS)
    began = time.perf_counter()
    try:
        turns.ask(turn)
        thread = start_thread(job, "test")
        async with asyncio.timeout(LONG_SECONDS):
            await is_over.wait()
        seconds = time.perf_counter() - began
    finally:
        sys.setswitchinterval(before)
    thread.join()
    most = 3 + 2 * seconds / _REST_SECONDS  # however slow the machine is; a timer may be early by its millisecond
    assert turns.num_taken <= most, "the turns of a flood do not rest"


async def test_rest_after_a_full_turn_ends_as_soon_as_somebody_asks() -> None:
    turns, order = Turns(), list[int]()

    def turn_of(uid: int, most_turns: int) -> Turn:
        def take(most: int, ends_at: float) -> int:
            order.append(uid)
            if order.count(uid) % most_turns:
                turns.ask(turn)
            return most

        turn = Turn(uid, take)
        return turn

    async def until_taken(number: int) -> None:
        async with asyncio.timeout(LONG_SECONDS):
            while turns.num_taken < number:
                await asyncio.sleep(0)

    crowd, neighbour = turn_of(CROWD, 3), turn_of(NEIGHBOUR, 1)
    turns.ask(crowd)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == [CROWD] * 3, "nobody else is there: no rest"
    turns.ask(neighbour)
    await until_taken(4)
    turns.ask(crowd)
    await until_taken(5)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert turns.num_taken == 5, "it rests"
    turns.ask(neighbour)
    await until_taken(8)
    assert order[3:] == [NEIGHBOUR, CROWD, NEIGHBOUR, CROWD, CROWD]


def anonymous_bytes(daemon: DaemonProcess) -> int:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def push(client: RawClient, data: bytes) -> bool:
    """Send as long as the daemon takes it; whether all is sent."""
    client.socket.settimeout(0.3)
    view = memoryview(data)
    with suppress(TimeoutError):
        while view:
            view = view[client.socket.send(view) :]
    client.socket.settimeout(LONG_SECONDS)
    return not view


def test_discards_that_wait_are_bounded_and_nobody_else_waits(start_daemon: StartDaemon, slab: SharedSlab) -> None:
    """They wait for writes, which take four seconds here. Each takes 3.4 KB: 270 MB for all of these."""
    plan = FaultPlan.of(Rule("pwritev", Latency(4.0)))
    daemon = start_daemon(plan=plan, codec="none")
    flood = wire.frame_of([wire.Discard(1000, (1,))] * 500) * 40
    with ExitStack() as stack:
        clients = [stack.enter_context(client_of(daemon)) for _ in range(4)]
        for client in clients:
            client.open(slab)
            client.send(wire.Write(1, 1, 1, 0, MIB, "", 1, ""))
        sent = [push(client, flood) for client in clients]
        assert not all(sent), "what does not fit waits where it is"
        assert anonymous_bytes(daemon) < 110 * MIB
        with client_of(daemon) as other:
            other.open(slab)
            other.send(wire.Write(1, 1, 1, 0, 100, "", 1, ""), wire.Discard(2, (1,)))
            assert {type(other.receive()), type(other.receive())} == {wire.Stored, wire.Gone}
        assert all(each.totals.spilled_bytes < MIB for each in report_of(daemon).sessions), "the writes still run"
        for client in clients:
            client.expect(wire.Stored)
            client.expect(wire.Gone)


def test_slow_writes_of_a_session_leave_room_for_others(start_daemon: StartDaemon, slab: SharedSlab) -> None:
    """Each takes a minute, and as long an encoder's working memory; the other's record needs that too, and no drive."""
    plan = FaultPlan.of(Rule("pwritev", Latency(60.0)))
    daemon = start_daemon(plan=plan, codec="zstd")
    with client_of(daemon) as client, client_of(daemon) as other:
        client.open(slab)
        client.send(*(wire.Write(key, key, 1, 0, MIB, "", 1, "") for key in range(40)))
        other.open(slab)
        other.send(wire.Write(1, 1, 1, 0, 100, "", 1, ""))
        other.expect(wire.Stored)
        assert {each.totals.spilled_bytes for each in report_of(daemon).sessions} == {0, 100}, "the writes still run"


NUM_QUEUED = 2000


@pytest.mark.parametrize("queued_bytes", ["1TiB", "8MiB"], ids=["queued", "held back"])
@pytest.mark.parametrize("is_closed", [False, True], ids=["killed", "closed"])
def test_what_a_client_leaves_is_not_begun(
    start_daemon: StartDaemon, slab: SharedSlab, is_closed: bool, queued_bytes: str
) -> None:
    """Each write takes a minute."""
    environment = {"TIERSTORE_SESSION_QUEUED_BYTES": queued_bytes}
    daemon = start_daemon(plan=FaultPlan.of(Rule("pwritev", Latency(60.0))), codec="none", environment=environment)
    with client_of(daemon) as client:
        client.open(slab)
        client.send(*(wire.Write(key, key, 1, 0, MIB, "", 1, "") for key in range(NUM_QUEUED)))
        until(lambda: report_of(daemon).sessions[0].num_jobs == NUM_QUEUED)
        if is_closed:
            client.send(wire.Close())
    until(lambda: report_of(daemon).jobs.writes.queued == 0)
    until(lambda: report_of(daemon).sessions[0].num_jobs < 20)
    (session,) = report_of(daemon).sessions
    assert session.num_jobs == report_of(daemon).jobs.writes.running > 0
    assert (session.queued_bytes, session.held_bytes) == (session.num_jobs * MIB, 0)


def test_what_was_dropped_with_a_connection_is_done_when_it_is_asked_for_again(
    start_daemon: StartDaemon, slab: SharedSlab
) -> None:
    daemon = start_daemon(
        plan=FaultPlan.of(Rule("pwritev", Latency(0.5), occurrences=tuple(range(1, 7)))), codec="none"
    )
    with client_of(daemon) as client:
        opened = client.open(slab)
        client.send(*(wire.Write(key, key, 1, 0, MIB, "", 1, "") for key in range(100)))
    with client_of(daemon) as client:
        client.resume(opened)
        (session,) = report_of(daemon).sessions
        assert session.num_jobs == 0
        assert session.num_records < 20
        client.share(slab)
        client.send(*(wire.Write(key, key, 1, 0, MIB, "", 1, "") for key in range(100)))
        assert sorted(client.expect(wire.Stored).request for _ in range(100)) == list(range(100))


def test_deaf_clients_are_not_heard_and_their_answers_are_bounded(start_daemon: StartDaemon) -> None:
    """A report of this daemon has 500 KB, and each question would be answered by one more."""
    daemon = start_daemon()
    with ExitStack() as stack:
        clients = []
        for _ in range(100):
            clients.append(client := stack.enter_context(client_of(daemon)))
            client.greet()
            client.send(wire.Open("\U0001f600" * wire.MOST_WORD, None, os.getpid()))
            client.expect(wire.Opened)
            client.socket.setblocking(False)
        for _ in range(6):  # each is answered by then
            for client in clients:
                with suppress(OSError):
                    client.socket.send(wire.frame_of([wire.Inspect()]))
            report_of(daemon)
        assert anonymous_bytes(daemon) < 110 * MIB
        clients[0].socket.settimeout(LONG_SECONDS)
        clients[0].expect(wire.Report)


class _Session:
    """As much of one as is counted. A connection of its own notes whether it is held."""

    def __init__(self, uid: int) -> None:
        self.lease, self.waiting_bytes, self.connection = SimpleNamespace(uid=uid), 0, self
        self.is_held = False

    def hold(self) -> None:
        self.is_held = True

    def go_on(self) -> None:
        self.is_held = False


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 2 * MIB)), max_size=200), st.randoms())
def test_what_waits_is_bounded_by_user_and_in_all_and_nobody_is_held_for_ever(
    requests: list[tuple[int, int]], source: Random
) -> None:
    waiting, most_bytes = Waiting(), max((num_bytes for _, num_bytes in requests), default=0)
    sessions = [_Session(number % 3) for number in range(8)]
    running: list[tuple[_Session, int]] = []
    left = list(requests)
    while left or running:
        left_now = [each for each in left if not sessions[each[0]].is_held]
        assert left_now or running, "somebody is held, and nothing runs"
        if left_now and (not running or source.random() < 0.7):
            left.remove(request := left_now[0])
            session = sessions[request[0]]
            if not waiting.begin(cast(Session, session), request[1]):
                waiting.hold(cast(Client, session), session.lease.uid)
            running.append((session, request[1]))
        else:
            waiting.end(*cast(tuple[Session, int], running.pop(source.randrange(len(running)))))
        always = len(sessions) * (MOST_OF_SESSION_BYTES + most_bytes)
        assert waiting.in_all_bytes == sum(num_bytes for _, num_bytes in running) <= MOST_IN_ALL_BYTES + always
        for uid in range(3):
            of_user = sum(num_bytes for session, num_bytes in running if session.lease.uid == uid)
            assert of_user <= MOST_OF_USER_BYTES + always


def test_the_slowest_of_the_user_with_too_many_answers_is_the_one_to_cut_off() -> None:
    unsent = Unsent()
    patient, slow, other = (cast(Client, name) for name in ("patient", "slow", "other"))
    unsent.count(patient, CROWD, MIB)
    unsent.count(slow, CROWD, MOST_OF_USER_BYTES - MIB)
    unsent.count(other, NEIGHBOUR, MOST_OF_USER_BYTES)
    assert unsent.slowest(CROWD) is None
    unsent.count(patient, CROWD, 1)
    assert (unsent.slowest(CROWD), unsent.slowest(NEIGHBOUR)) == (slow, slow)
    unsent.count(slow, CROWD, MIB - MOST_OF_USER_BYTES)
    assert unsent.slowest(CROWD) is None


def test_records_of_a_user_are_bounded_in_number_over_restarts(start_daemon: StartDaemon, slab: SharedSlab) -> None:
    daemon = start_daemon(max_records_per_user=3)
    with client_of(daemon) as client, client_of(daemon) as another:
        opened, _ = client.open(slab), another.open(slab)
        for key, each in enumerate((client, client, another)):
            each.send(wire.Write(key, key, 1, 0, 1, "", 1, ""))
            each.expect(wire.Stored)
        for each in (client, another):
            each.send(wire.Write(9, 9, 1, 0, 1, "", 1, ""))
            full = each.expect(wire.Full)
            assert full.is_quota
            assert "has 3 records, and --max-records-per-user is 3" in full.reason
        another.end()
        client.send(wire.Write(4, 4, 1, 0, 1, "", 1, ""))
        client.expect(wire.Stored)
    daemon.stop()
    daemon = start_daemon(path=daemon.path, socket=daemon.socket, max_records_per_user=3)
    with client_of(daemon) as client:
        client.resume(opened)
        client.share(slab)
        client.send(wire.Write(5, 5, 1, 0, 1, "", 1, ""))
        client.expect(wire.Full)
        client.send(wire.Discard(6, (0, 77)))
        client.expect(wire.Gone)
        client.send(wire.Write(7, 7, 1, 0, 1, "", 1, ""))
        client.expect(wire.Stored)


def test_what_comes_after_close_is_not_heard(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with client_of(daemon) as client:
        client.open()
        client.socket.sendall(wire.frame_of([wire.Close()] * 2000))
        client.expect(wire.Closed)
        assert client.receive() is None
        assert report_of(daemon).num_sessions == 0
    assert "refused" not in daemon.log


def test_clients_of_the_earlier_protocol_are_told_what_to_do(start_daemon: StartDaemon) -> None:
    with client_of(start_daemon()) as client:
        client.send(wire.Hello((1,), "tierstore 0.2.0"))
        words = ("version 2 of the protocol", "tierstore 0.2.0 1:", "install the same tierstore")
        assert client.is_refused(*words)

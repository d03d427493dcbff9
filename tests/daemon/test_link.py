"""The client's end of a session, with a peer that says whatever the test wants, and leaves when it wants."""

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.daemon import wire
from tests.daemon.peer import OPENED, WELCOME, Guest, Peer, opened_disk
from tests.store.disk_conformance import PLAIN
from tierstore.errors import CorruptDataError, DaemonUnavailableError, ProtocolError, StorageIOError, StoreFullError
from tierstore.sidecar import link as link_module
from tierstore.sidecar.channel import Channel
from tierstore.sidecar.link import Answer, DaemonLink
from tierstore.sidecar.window import SharedSlab

SECONDS = 20.0
pytestmark = pytest.mark.timeout(SECONDS)


def link_to(peer: Peer, reconnect_seconds: float = SECONDS) -> DaemonLink:
    return DaemonLink(peer.address, wire.Open("test", None, 1), reconnect_seconds)


@asynccontextmanager
async def opened_link(peer: Peer, reconnect_seconds: float = SECONDS) -> AsyncIterator[tuple[DaemonLink, Guest]]:
    """A link with a session, which is closed at the end, whether the peer says so or not."""
    link = link_to(peer, reconnect_seconds)
    opening = asyncio.ensure_future(link.open())
    guest = await peer.guest()
    await guest.welcome(wire.Open, OPENED)
    await opening
    try:
        yield link, guest
    finally:
        closing = asyncio.ensure_future(link.close())
        peer.close()
        await closing


def discard(link: DaemonLink, key: int, late: list[Answer | None] | None = None) -> asyncio.Future[Answer]:
    return asyncio.ensure_future(link.ask(wire.Discard, (key,), on_late=[].append if late is None else late.append))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (wire.Refused("speaks versions 7, 8"), "speaks versions 7, 8"),
        (wire.Welcome(9, "peer", 1, 1.0), "instead of a Welcome to version 2"),
        (wire.Closed(), "instead of a Welcome"),
        (wire.Resumed(), "Resumed instead of Opened"),
    ],
)
async def test_wrong_answer_to_hello_or_open_is_a_protocol_error(
    peer: Peer, said: wire.DaemonMessage, words: str
) -> None:
    opening = asyncio.ensure_future(link_to(peer).open())
    guest = await peer.guest()
    if said == wire.Resumed():
        await guest.welcome(wire.Open)
    else:
        await guest.expect(wire.Hello)
    await guest.say(said)
    with pytest.raises(ProtocolError, match=words):
        await opening
    assert await guest.hear() is None, "and the connection is closed"


async def test_peer_that_leaves_as_soon_as_the_session_is_open_is_noticed(peer: Peer) -> None:
    """The end comes while the client is about to be told of the beginning; `open` or the next request says so."""
    link = link_to(peer, reconnect_seconds=0.0)

    async def use() -> None:
        await link.open()
        await discard(link, 5)

    using = asyncio.ensure_future(use())
    guest = await peer.guest()
    await guest.welcome(wire.Open, OPENED)
    guest.leave()
    with pytest.raises(DaemonUnavailableError, match=r"closed the connection|no answer to Resume"):
        await using
    peer.close()
    await link.close()


@pytest.mark.parametrize("answers", ["nothing", "Welcome"])
async def test_no_answer_is_given_up(peer: Peer, monkeypatch: pytest.MonkeyPatch, answers: str) -> None:
    monkeypatch.setattr(link_module, "_LONGEST_HANDSHAKE_SECONDS", 0.1)
    opening = asyncio.ensure_future(link_to(peer).open())
    guest = await peer.guest()
    if answers == "Welcome":
        await guest.say(WELCOME)
    with pytest.raises(DaemonUnavailableError, match=r"no answer to Open within 0.1 s.*nothing was stored"):
        await opening


@pytest.mark.parametrize(
    "nonsense",
    [wire.Gone(99), wire.Closed(), wire.Refused("it has had enough")],
    ids=["answer to nothing", "word out of place", "refusal"],
)
async def test_nonsense_in_a_session_loses_the_connection_and_no_request(
    peer: Peer, nonsense: wire.DaemonMessage
) -> None:
    async with opened_link(peer) as (link, guest):
        answer = discard(link, 5)
        first = await guest.expect(wire.Discard)
        await guest.say(nonsense)
        guest = await peer.guest()
        await guest.expect(wire.Hello)
        await guest.say(WELCOME)
        resume = await guest.expect(wire.Resume)
        assert (resume.session, resume.token) == (OPENED.session, OPENED.token)
        await guest.say(wire.Resumed())
        assert await guest.expect(wire.Discard) == first, "it is said again"
        await guest.say(wire.Gone(first.request))
        assert await answer == wire.Gone(first.request)


async def test_silent_peer_is_asked_whether_it_lives_and_then_given_up(peer: Peer) -> None:
    async with opened_link(peer, reconnect_seconds=0.0) as (link, guest):
        late: list[Answer | None] = []
        answer = discard(link, 5, late)
        await guest.expect(wire.Discard)
        await guest.expect(wire.Inspect)
        with pytest.raises(DaemonUnavailableError, match="no sign of life for 1 s") as caught:
            await answer
        assert caught.value.waited_seconds >= 1
        assert await guest.hear() is None
        assert late == [], "it may still be answered"
    assert late == [None], "never, as the session is over"


async def test_own_standstill_is_not_taken_for_the_peer_s(peer: Peer) -> None:
    async with opened_link(peer, reconnect_seconds=1.0) as (link, guest):
        answer = discard(link, 5)
        request = (await guest.expect(wire.Discard)).request
        time.sleep(1.5)  # the loop itself stands still, for longer than the peer may be silent
        await guest.say(wire.Gone(request))
        assert await answer == wire.Gone(request)


async def test_slabs_are_shared_again_before_requests_and_those_of_meanwhile_too(peer: Peer) -> None:
    slabs = [SharedSlab(number, 4096) for number in range(3)]
    async with opened_link(peer) as (link, guest):
        for slab in slabs[:2]:
            link.share(slab)
            assert (await guest.expect(wire.Slab)).slab == slab.number
        answers = [discard(link, key) for key in (1, 2)]
        requests = [await guest.expect(wire.Discard) for _ in answers]
        guest.leave()
        guest = await peer.guest()  # the link is away until it is welcomed
        link.share(slabs[2])
        await guest.welcome(wire.Resume, wire.Resumed())
        assert [(await guest.expect(wire.Slab)).slab for _ in slabs] == [0, 1, 2]
        assert [await guest.expect(wire.Discard) for _ in answers] == requests
        await guest.say(*(wire.Gone(each.request) for each in requests))
        await asyncio.gather(*answers)
    for slab in slabs:
        slab.close()


async def test_no_descriptor_to_share_a_slab_again_is_waited_for(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    slab, send_with, refusals = SharedSlab(0, 4096), Channel.send_with, [OSError(errno.EMFILE, "Too many open files")]

    def refuse_once(*given: Any) -> None:
        if refusals:
            raise refusals.pop()
        send_with(*given)

    async with opened_link(peer) as (link, guest):
        link.share(slab)
        await guest.expect(wire.Slab)
        monkeypatch.setattr(Channel, "send_with", refuse_once)
        guest.leave()
        await (await peer.guest()).welcome(wire.Resume, wire.Resumed())
        guest = await peer.guest()
        await guest.welcome(wire.Resume, wire.Resumed())
        await guest.expect(wire.Slab)
        assert not refusals
    slab.close()


@pytest.mark.parametrize(
    "said", [wire.Refused("not now", False), wire.Closed(), None], ids=["refusal", "nonsense", "no answer"]
)
async def test_resume_that_fails_is_tried_again(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, said: wire.DaemonMessage | None
) -> None:
    async with opened_link(peer) as (link, guest):
        monkeypatch.setattr(link_module, "_LONGEST_HANDSHAKE_SECONDS", 0.5 if said is None else SECONDS)
        answer = discard(link, 5)
        guest.leave()
        await (await peer.guest()).welcome(wire.Resume, *([] if said is None else [said]))
        monkeypatch.setattr(link_module, "_LONGEST_HANDSHAKE_SECONDS", SECONDS)
        guest = await peer.guest()
        await guest.welcome(wire.Resume, wire.Resumed())
        request = (await guest.expect(wire.Discard)).request
        await guest.say(wire.Gone(request))
        assert await answer == wire.Gone(request)


async def test_resume_that_takes_long_is_given_up(peer: Peer) -> None:
    async with opened_link(peer, reconnect_seconds=0.5) as (link, guest):
        answer = discard(link, 5)
        guest.leave()
        guest = await peer.guest()
        await guest.welcome(wire.Resume)
        with pytest.raises(DaemonUnavailableError, match="no answer to Resume within 1 s"):
            await answer


async def test_peer_that_comes_back_and_fails_at_each_request_is_not_asked_for_ever(peer: Peer) -> None:
    async with opened_link(peer, reconnect_seconds=0.5) as (link, guest):
        answer = discard(link, 5)

        async def fail(guest: Guest) -> None:
            while True:
                await guest.expect(wire.Discard)
                guest.leave()
                guest = await peer.guest()
                await guest.welcome(wire.Resume, wire.Resumed())

        failing = asyncio.ensure_future(fail(guest))
        with pytest.raises(DaemonUnavailableError):
            await answer
        failing.cancel()


async def test_final_refusal_ends_everything_at_once(peer: Peer) -> None:
    async with opened_link(peer) as (link, guest):
        late: list[Answer | None] = []
        answers = [discard(link, key, late) for key in (1, 2)]
        guest.leave()
        await (await peer.guest()).welcome(wire.Resume, wire.Refused("no such session", True))
        for answer in answers:
            with pytest.raises(DaemonUnavailableError, match=r"no such session.*is lost"):
                await answer
        assert late == [None, None]
        with pytest.raises(DaemonUnavailableError, match="no such session"):
            await discard(link, 3, late)


async def lose(peer: Peer, link: DaemonLink, guest: Guest, late: list[Answer | None]) -> wire.Discard:
    """Until the link has given up; the request that was told so, and is still to be answered."""
    answer = discard(link, 5, late)
    told: wire.Discard = await guest.expect(wire.Discard)
    guest.leave()
    await (await peer.guest()).welcome(wire.Resume, wire.Refused("not now", False))
    with pytest.raises(DaemonUnavailableError, match="not now"):
        await answer
    return told


async def test_link_that_has_given_up_is_back_though_nobody_asks_for_anything(peer: Peer) -> None:
    async with opened_link(peer, reconnect_seconds=0.0) as (link, guest):
        late: list[Answer | None] = []
        told = await lose(peer, link, guest, late)
        for said in (wire.Refused("not yet", False), wire.Closed()):
            await (await peer.guest()).welcome(wire.Resume, said)
        guest = await peer.guest()
        await guest.welcome(wire.Resume, wire.Resumed())
        assert await guest.expect(wire.Discard) == told, "it is still to be answered"
        answer = discard(link, 6)
        request = (await guest.expect(wire.Discard)).request
        await guest.say(wire.Gone(told.request), wire.Gone(request))
        assert await answer == wire.Gone(request)
        assert late == [wire.Gone(told.request)]


async def test_request_of_a_link_that_has_given_up_is_told_after_the_next_attempt(peer: Peer) -> None:
    async with opened_link(peer, reconnect_seconds=0.0) as (link, guest):
        late: list[Answer | None] = []
        await lose(peer, link, guest, late)
        for number in range(2):
            answer = discard(link, 6, late)
            await (await peer.guest()).welcome(wire.Resume, wire.Refused(f"not now, {number}", False))
            with pytest.raises(DaemonUnavailableError, match=f"not now, {number}"):
                await answer
        reaching = asyncio.ensure_future(link.reach())
        await (await peer.guest()).welcome(wire.Resume, wire.Resumed())
        await reaching
        assert late == []


async def test_close_while_it_is_away_and_without_an_answer_ends(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_CLOSE_SECONDS", 0.1)
    async with opened_link(peer) as (link, guest):
        answer = discard(link, 5)
        guest.leave()
        await peer.guest()  # which says nothing
        await link.close()
        with pytest.raises(DaemonUnavailableError, match="it was closed"):
            await answer
    async with opened_link(peer) as (link, guest):
        closing = asyncio.ensure_future(link.close())
        await guest.expect(wire.Close)
        await closing
        assert await guest.hear() is None


async def test_answers_become_the_tier_s_errors_and_slots_come_back(peer: Peer) -> None:
    """The window has room for one such record: each of these would wait for ever if its slot were not given back."""
    async with opened_disk(peer) as (disk, guest):
        content = bytearray(50_000)
        outcomes: list[tuple[Callable[[int], wire.DaemonMessage], type[Exception] | None, str]] = [
            (lambda n: wire.Failed(n, "write", "segment 3", "broken"), StorageIOError, "still in memory"),
            (lambda n: wire.Full(n, False, 1, 2, "no room there"), StoreFullError, "no room there"),
            (lambda n: wire.Loaded(n, 1), ProtocolError, "Loaded in answer to something else"),
            (lambda n: wire.Stored(n, 50_000, "none", "uint8", 1), None, ""),
        ]
        for key, (answer, error, words) in enumerate(outcomes):
            writing = asyncio.ensure_future(disk.write(key, memoryview(content), PLAIN))
            await guest.say(answer((await guest.expect(wire.Write)).request))
            await _comes_out(writing, error, words)
        stored = len(outcomes) - 1
        outcomes = [
            (lambda n: wire.Failed(n, "read", "segment 3", "broken"), StorageIOError, "still with the daemon"),
            (lambda n: wire.Bad(n, "segment 3", "1", "2"), CorruptDataError, "segment 3"),
            (lambda n: wire.Gone(n), ProtocolError, "Gone in answer to something else"),
            (lambda n: wire.Loaded(n, 50_000), None, ""),
        ]
        for answer, error, words in outcomes:
            reading = asyncio.ensure_future(disk.read(stored, memoryview(content)))
            await guest.say(answer((await guest.expect(wire.Read)).request))
            await _comes_out(reading, error, words)


async def _comes_out(work: asyncio.Future[Any], error: type[Exception] | None, words: str) -> None:
    if error is None:
        await work
        return
    with pytest.raises(error, match=words):
        await work


async def test_key_on_the_wire_is_used_once(peer: Peer) -> None:
    """Also where the store uses its own again: a late discard of the old record would free the new one."""
    async with opened_disk(peer) as (disk, guest):
        used = []
        for _ in range(2):
            writing = asyncio.ensure_future(disk.write(1, memoryview(bytes(1000)), PLAIN))
            write = await guest.expect(wire.Write)
            used.append(write.key)
            await guest.say(wire.Stored(write.request, 4096, "none", "uint8", 1))
            await writing
            discarding = asyncio.ensure_future(disk.discard([1]))
            discarded = await guest.expect(wire.Discard)
            assert discarded.keys == (write.key,)
            await guest.say(wire.Gone(discarded.request))
            await discarding
        assert used[0] != used[1]

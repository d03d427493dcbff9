"""Frames and descriptors over a real pair of sockets: all of it arrives in order, and nothing stays open at any end."""

import array
import asyncio
import gc
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.daemon import wire
from tests.descriptors import descriptors_of
from tierstore.errors import ProtocolError
from tierstore.sidecar.channel import Channel

Socket = socket.socket
TIMEOUT_SECONDS = 20  # of every wait: only a broken channel comes near it


@pytest.fixture(autouse=True)
async def _no_descriptor_leaks() -> AsyncIterator[None]:
    """Async: the loop has its own open when it begins to count, and opens some anew each time it runs."""
    gc.collect()
    before = set(descriptors_of())
    yield
    gc.collect()
    assert set(descriptors_of()) == before, descriptors_of()


@pytest.fixture
def connection() -> Iterator[tuple[Socket, Socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        yield ours, theirs


@pytest.fixture
def ours(connection: tuple[Socket, Socket]) -> Socket:
    return connection[0]


@pytest.fixture
def theirs(connection: tuple[Socket, Socket]) -> Socket:
    return connection[1]


class End:
    """A channel and what it reported."""

    def __init__(self, connection: socket.socket, kinds: object = wire.ClientMessage) -> None:
        self.messages: list[Any] = []
        self.ends: list[Exception | None] = []
        self.on_message: Callable[[Any], None] = self.messages.append
        self._changed = asyncio.Event()
        self.channel = Channel(connection, kinds, "the peer", self._hear, self._over)

    def _hear(self, message: Any) -> None:
        self._changed.set()
        self.on_message(message)

    def _over(self, error: Exception | None) -> None:
        self._changed.set()
        self.ends.append(error)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_end(self) -> Exception | None:
        await self.until(lambda: self.ends)
        (error,) = self.ends
        return error


async def _received(connection: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many bytes, or fewer up to the end of the stream."""
    found = bytearray()
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while len(found) < num_bytes:
            data = await asyncio.get_running_loop().sock_recv(connection, min(2**20, num_bytes - len(found)))
            if not data:
                break
            found += data
    return bytes(found)


async def _received_frame(connection: socket.socket) -> list[Any]:
    header = await _received(connection, 4)
    body = await _received(connection, struct.unpack("<I", header)[0])
    (messages,) = wire.FrameReader(wire.DaemonMessage, "").feed(header + body)
    return messages


def _memory(number: int) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, struct.pack("<I", number))
    return descriptor


def _number_in(descriptor: int) -> int:
    (number,) = struct.unpack("<I", os.pread(descriptor, 4, 0))
    os.close(descriptor)
    return int(number)


def _send_descriptors(connection: socket.socket, data: bytes, num_descriptors: int) -> None:
    """Raw: the data and so many descriptors with it."""
    memory = _memory(0)
    rights = array.array("i", [memory] * num_descriptors)
    connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    os.close(memory)


async def test_send_more_than_a_frame_holds_goes_out_in_several_in_order(ours: Socket, theirs: Socket) -> None:
    end = End(ours)
    sent = [wire.Failed(number, "write", "x" * 4096, "") for number in range(600)]
    for message in sent:
        end.channel.send(message)
    found: list[Any] = []
    num_frames = 0
    while len(found) < len(sent):
        found += await _received_frame(theirs)
        num_frames += 1
    assert found == sent
    assert 1 < num_frames <= 4
    end.channel.close()


async def test_descriptors_arrive_with_their_messages_in_order(ours: Socket, theirs: Socket) -> None:
    sender, receiver = End(ours, wire.DaemonMessage), End(theirs)
    found: list[tuple[int, int]] = []

    def hear(message: Any) -> None:
        if isinstance(message, wire.Slab):
            descriptor = receiver.channel.take_descriptor()
            assert not os.get_inheritable(descriptor), "a program that this one starts would have it"
            found.append((message.slab, _number_in(descriptor)))
        else:
            found.append((message.slab, message.slab))

    receiver.on_message = hear
    for number in range(0, 40, 2):
        memory = _memory(number)
        sender.channel.send_with(wire.Slab(number, 4), memory)
        sender.channel.send(wire.Unmap(number + 1))
        os.close(memory)  # the copy on its way is another
    await receiver.until(lambda: len(found) == 40)
    assert found == [(number, number) for number in range(40)]
    sender.channel.close()
    assert await receiver.until_end() is None


async def test_peer_that_does_not_read_gets_the_rest_when_it_does(ours: Socket, theirs: Socket) -> None:
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender = End(ours, wire.DaemonMessage)
    reports = [wire.Open("x" * 256, None, number) for number in range(3000)]
    memory = _memory(7)
    for report in reports:
        sender.channel.send(report)
    sender.channel.send_with(wire.Slab(7, 4), memory)
    sender.channel.send(reports[0])
    sender.channel.send_with(wire.Discard(1, tuple(range(wire.MAX_KEYS))), memory)  # more than is sent at once
    os.close(memory)
    await asyncio.sleep(0)  # one turn of the loop: all that the socket takes is sent
    await asyncio.sleep(0)
    assert sender.channel.unsent_bytes > 100_000
    receiver = End(theirs)
    await receiver.until(lambda: len(receiver.messages) == 3003)
    assert receiver.messages == [*reports, wire.Slab(7, 4), reports[0], wire.Discard(1, tuple(range(wire.MAX_KEYS)))]
    assert [_number_in(receiver.channel.take_descriptor()) for _ in range(2)] == [7, 7]
    assert sender.channel.unsent_bytes == 0
    sender.channel.close()
    assert await receiver.until_end() is None


async def test_end_when_sent_delivers_everything_to_a_peer_that_reads_later(ours: Socket, theirs: Socket) -> None:
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender = End(ours)
    for number in range(10_000):
        sender.channel.send(wire.Gone(number))
    sender.channel.send(wire.Refused("enough"))
    sender.channel.end_when_sent()
    assert sender.channel.unsent_bytes > 0
    assert sender.ends == []
    theirs.send(wire.frame_of([wire.Close()]))  # is not listened to any more
    receiver = End(theirs, wire.DaemonMessage)
    await receiver.until(lambda: len(receiver.messages) == 10_001)
    assert receiver.messages == [*map(wire.Gone, range(10_000)), wire.Refused("enough")]
    assert await sender.until_end() is None
    await receiver.until_end()
    assert sender.messages == []


@pytest.mark.parametrize("num_left_out", [0, 1])
async def test_peer_that_leaves_inside_a_frame_broke_the_protocol(
    ours: Socket, theirs: Socket, num_left_out: int
) -> None:
    end, frame = End(ours), wire.frame_of([wire.Unmap(1)])
    theirs.send(frame[: len(frame) - num_left_out])
    theirs.close()
    error = await end.until_end()
    assert end.messages == [wire.Unmap(1)] * (1 - num_left_out)
    assert isinstance(error, ProtocolError) == bool(num_left_out)
    assert ("inside a frame" in str(error)) == bool(num_left_out)


@pytest.mark.parametrize(
    ("frame", "num_frames", "num_descriptors", "words"),
    [
        (wire.frame_of([wire.Unmap(1)]), 1, 9, "more descriptors"),
        (wire.frame_of([wire.Unmap(1)]), 9, 1, "more descriptors"),
        (wire.frame_of([wire.Slab(1, 4)]), 1, 0, "no descriptor"),
        (b"\x01\x00\x00\x00\xc1", 1, 3, "not a message"),
    ],
)
async def test_descriptors_too_many_or_missing_end_the_connection_and_are_closed(
    ours: Socket, theirs: Socket, frame: bytes, num_frames: int, num_descriptors: int, words: str
) -> None:
    end = End(ours)
    if not num_descriptors:
        end.on_message = lambda message: os.close(end.channel.take_descriptor())
    for _ in range(num_frames):
        _send_descriptors(theirs, frame, num_descriptors)
    error = await end.until_end()
    assert isinstance(error, ProtocolError)
    assert words in str(error)
    assert len(end.messages) < num_frames


async def test_descriptors_unsent_and_untaken_are_closed_at_the_end(ours: Socket, theirs: Socket) -> None:
    end = End(ours)
    _send_descriptors(theirs, wire.frame_of([wire.Unmap(1)]), num_descriptors=2)
    await end.until(lambda: end.messages)
    memory = _memory(0)
    for _ in range(3):
        end.channel.send_with(wire.Slab(1, 4), memory)
    end.channel.close()
    end.channel.send_with(wire.Slab(1, 4), memory)  # too late
    end.channel.send(wire.Gone(1))
    os.close(memory)
    end.channel.close()
    end.channel.end_when_sent()
    await asyncio.sleep(0)
    assert end.ends == [], "who closes knows"
    assert await _received(theirs, 1) == b""


@pytest.mark.parametrize("ends_itself", [False, True])
async def test_peer_is_gone_what_it_said_last_is_heard_before_the_end(
    ours: Socket, theirs: Socket, ends_itself: bool
) -> None:
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**21)
    last = [wire.Failed(number, "read", "x" * 4096, "") for number in range(70)]  # more than is read at once
    theirs.send(wire.frame_of([wire.Gone(1)]) + wire.frame_of([*last, wire.Refused("no room")]))
    theirs.close()
    end = End(ours, wire.DaemonMessage)
    memory = _memory(0)

    def hear(message: Any) -> None:
        end.messages.append(message)
        end.channel.send_with(wire.Slab(1, 4), memory)  # fails before the rest was read
        end.channel.send(wire.Unmap(1))
        if ends_itself and isinstance(message, wire.Refused):
            end.channel.end_when_sent()

    end.on_message = hear
    assert isinstance(await end.until_end(), BrokenPipeError) == ends_itself
    assert end.messages == [wire.Gone(1), *last, wire.Refused("no room")]
    os.close(memory)


async def test_peer_leaves_with_something_unread_all_it_said_is_heard_before_the_end(
    ours: Socket, theirs: Socket
) -> None:
    """As a daemon that is killed: the kernel reports an error then, not the end of the stream."""

    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**21)
    ours.send(wire.frame_of([wire.Unmap(1)]))
    frame = wire.frame_of([wire.Failed(number, "read", "x" * 4096, "") for number in range(70)])
    theirs.send(frame)  # more than is read at once
    theirs.close()
    end = End(ours, wire.DaemonMessage)
    assert isinstance(await end.until_end(), ConnectionResetError)
    assert len(end.messages) == 70


@pytest.mark.parametrize("ends_itself", [False, True])
async def test_peer_leaves_while_nobody_listens_its_end_is_noticed(
    ours: Socket, theirs: Socket, ends_itself: bool
) -> None:
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    end = End(ours)
    if ends_itself:
        for number in range(10_000):
            end.channel.send(wire.Gone(number))
        end.channel.end_when_sent()
    else:
        end.channel.stop_listening()
    theirs.send(wire.frame_of([wire.Unmap(1)]))
    theirs.close()
    assert isinstance(await end.until_end(), BrokenPipeError)
    assert end.messages == []


async def test_peer_is_gone_no_signal_is_raised(ours: Socket, theirs: Socket) -> None:
    """A process that has made SIGPIPE deadly again would die of the daemon's end."""
    theirs.shutdown(socket.SHUT_RD)  # there is nothing to hear, so this is noticed by sending alone
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})  # one that is raised stays pending
    try:
        end = End(ours)
        end.channel.send(wire.Gone(1))
        for _ in range(3):  # turns of the loop
            await asyncio.sleep(0)
        raised = signal.SIGPIPE in signal.sigpending()
        if raised:
            signal.sigwait({signal.SIGPIPE})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert not raised
    end.channel.close()


async def test_who_is_called_raises_the_connection_ends_and_the_loop_knows(ours: Socket, theirs: Socket) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    end = End(ours)
    fault = ZeroDivisionError("a bug")

    def hear(message: Any) -> None:
        raise fault

    end.on_message = hear
    theirs.send(wire.frame_of([wire.Unmap(1)]))
    assert await end.until_end() is fault
    assert await _received(theirs, 1) == b""
    assert [context["exception"] for context in reported] == [fault]


async def test_message_that_no_frame_can_carry_is_refused_to_who_sends_it(ours: Socket, theirs: Socket) -> None:
    end = End(ours)
    for message in (wire.Report(bytes(wire.MAX_FRAME_BYTES)), wire.Gone(2**64), wire.Refused("\udc80")):
        with pytest.raises((ValueError, OverflowError)):
            end.channel.send(message)
    end.channel.send(longest := wire.Report(bytes(wire.MAX_FRAME_BYTES - 20)))
    assert await _received_frame(theirs) == [longest]
    end.channel.close()

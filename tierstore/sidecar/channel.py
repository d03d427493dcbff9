"""Messages over a connected unix socket, in frames, with descriptors. For one loop."""

from __future__ import annotations

import array
import asyncio
import errno
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from ..errors import ProtocolError
from .frames import MAX_CLIENT_FRAME_BYTES, MAX_FRAME_BYTES, FrameReader, encoded, frame_of, frames_of
from .messages import ClientMessage, DaemonMessage

_RECEIVE_BYTES = 256 * 2**10
_RECEIVE_AT_ONE_GO_BYTES = MAX_CLIENT_FRAME_BYTES
_MOST_UNSENT_BYTES = 64 * 2**10
_MOST_DESCRIPTORS = 8  # that have arrived and no message has claimed; more are an attack, or a bug


class Pace(NamedTuple):
    """How a peer that is not trusted is heard: in turns. What it says waits in the socket meanwhile, at its expense.

    `ask`: called when something has come; somebody then calls `Channel.take_turn`. `count_unsent`: called with how many
    bytes more, or fewer, wait for the peer to take them. While they are many, it is not heard."""

    ask: Callable[[], None]
    count_unsent: Callable[[int], None]


class Channel:
    """One connection. Lives on the running loop. No call blocks, or raises because of the peer.

    Messages that are sent during one turn of the loop go out in as few frames as a peer accepts. When the peer is gone,
    what it had sent before is still handed over; with a `pace`, at most one turn of it.

    Args:
        kinds: the messages that the peer may send, as `FrameReader`'s.
        on_message: called with each message, in order. If it raises, the connection ends; a ProtocolError goes to
            `on_end` only, everything else on to whoever called this as well.
        on_end: called once, when the connection is over, with the reason; with None if the peer closed it, or if all is
            sent (`end_when_sent` may call it before it returns). Not called after `close`.
        frame_seconds: the longest that a frame may take to arrive once it has begun; None: no limit.
        pace: None: everything is heard as soon as it has come.
    """

    def __init__(
        self,
        connection: socket.socket,
        kinds: object,
        peer: str,
        on_message: Callable[[Any], None],
        on_end: Callable[[Exception | None], None],
        *,
        frame_seconds: float | None = None,
        pace: Pace | None = None,
    ) -> None:
        connection.setblocking(False)
        self.peer = peer
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(kinds, peer)
        self._arrived: deque[Any] = deque()  # messages of the frame that is being handled
        self._on_message = on_message
        self._on_end = on_end
        self._descriptors: deque[int] = deque()
        self._batch: list[msgspec.Raw] = []
        self._outgoing: deque[tuple[memoryview, int | None]] = deque()  # each with a descriptor to go along
        self._most_bytes = MAX_FRAME_BYTES if kinds == ClientMessage else MAX_CLIENT_FRAME_BYTES  # of a frame to it
        self.unsent_bytes = 0  # in frames that the peer has not taken yet
        self._pace = pace
        self._is_due = False  # it has asked for a turn
        self._is_held = False
        self._frame_seconds = frame_seconds
        self._frame_timer: asyncio.TimerHandle | None = None
        self.is_open = True
        self._is_listening = True
        self._watched: int | None = select.EPOLLIN  # events of the socket; None: not even its end
        self._is_waiting = False  # for the socket to take more
        self._ends_when_sent = False
        self._lost: OSError | None = None  # why nothing can be sent any more
        # The loop watches an epoll, not the socket: uvloop (0.23) reports an error of a descriptor once and then stops
        # watching it. A peer that leaves with unread data is such an error; its last messages or end would be missed.
        self._events = select.epoll()
        self._events.register(connection, select.EPOLLIN)
        self._loop.add_reader(self._events.fileno(), self._wake)

    def send(self, message: ClientMessage | DaemonMessage | msgspec.Raw) -> None:
        """Send a message with the others of this turn of the loop; dropped if the connection is over. Raises as
        `encoded`."""
        raw = message if isinstance(message, msgspec.Raw) else encoded(message, self._most_bytes)
        if self._can_send:
            if not self._batch:
                self._loop.call_soon(self._flush)
            self._batch.append(raw)

    def send_with(self, message: ClientMessage | DaemonMessage, descriptor: int) -> None:
        """Send a message in a frame of its own, with a copy of the descriptor; dropped if the connection is over."""
        self._collect()
        if self._can_send:
            self._put_out(frame_of([message]), os.dup(descriptor))
            self._loop.call_soon(self._flush)

    def send_frame(self, frame: bytes) -> None:
        """Send what `frame_of` has made, perhaps for several peers, at once as far as the socket takes it; dropped if
        the connection is over. `on_end` may be called before it returns."""
        self._collect()
        if self._can_send:
            self._put_out(frame, None)
            self._flush()

    def take_descriptor(self) -> int:
        """The oldest descriptor that nobody has taken, else ProtocolError; the caller closes it."""
        if not self._descriptors:
            raise ProtocolError(self.peer, "no descriptor came with the message that needs one")
        return self._descriptors.popleft()

    def stop_listening(self) -> None:
        """Read nothing more from the peer. Messages can still be sent, and its end is still noticed. Idempotent."""
        if self.is_open:
            self._is_listening = False
            self._watch()

    def hold(self) -> None:
        """Hear nothing more until `go_on`, or until the peer is gone; what has come by then is kept. Idempotent."""
        self._is_held = True

    def go_on(self) -> None:
        self._is_held = False
        self._hear()

    def end_when_sent(self) -> None:
        """Stop listening, send all that is to be sent, then close; idempotent. A peer that does not read delays it."""
        if self._lost is not None:
            self._end(self._lost)
        if self.is_open:
            self._ends_when_sent = True
            self.stop_listening()
            self._flush()

    def close(self) -> None:
        """Close the socket, and every descriptor that nobody took; idempotent. Unsent messages are dropped."""
        if not self.is_open:
            return
        self._loop.remove_reader(self._events.fileno())
        self.is_open = False
        if self._frame_timer is not None:
            self._frame_timer.cancel()
        self._events.close()
        self._connection.close()
        self._drop_outgoing()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    # --- events ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        for _, events in self._events.poll(0):
            if events & select.EPOLLOUT:
                self._write()
            if self.is_open and self._can_hear and not self._is_due and events & ~select.EPOLLOUT:
                self._take_or_ask()
            elif self.is_open and events & (select.EPOLLHUP | select.EPOLLERR):  # reported until something is done
                self._lose(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))

    def _watch(self) -> None:
        """While a peer is not heard, the loop is told of nothing but that it is gone, and of that once."""
        hears = self._can_hear and not self._is_due
        events = (select.EPOLLIN if hears else 0) | (select.EPOLLOUT if self._is_waiting else 0)
        watched = events if events or not self._is_listening or self._lost is None else None
        if watched == self._watched:
            return
        if watched is None:
            self._events.unregister(self._connection)
        elif self._watched is None:
            self._events.register(self._connection, watched)
        else:
            self._events.modify(self._connection, watched)
        self._watched = watched

    # --- in -------------------------------------------------------------------------------------------------------

    @property
    def _can_hear(self) -> bool:
        is_read = self._pace is None or self.unsent_bytes <= _MOST_UNSENT_BYTES  # else its answers pile up
        is_held = self._is_held and self._lost is None
        return self.is_open and self._is_listening and not is_held and is_read

    @property
    def _is_last_turn(self) -> bool:
        """Of a peer that is not trusted and is gone: what else it has said would cost the others, and no one hears the
        answers."""
        return self._pace is not None and self._lost is not None

    @property
    def _has_more(self) -> bool:
        return bool(self._arrived) or self._reader.has_frame

    def _hear(self) -> None:
        """Go on with what has come, if there is any and nothing prevents it; else wait for more."""
        if self._can_hear and not self._is_due and self._has_more:
            self._take_or_ask()
        elif self.is_open:
            self._watch()

    def _take_or_ask(self) -> None:
        if self._pace is None:
            self.take_turn()
            return
        self._is_due = True
        self._watch()
        self._pace.ask()

    def take_turn(self, most: float = math.inf, ends_at: float = math.inf) -> int:
        """Handle what has come, at most so much, and until `ends_at` (`time.perf_counter`); then ask for another turn
        if there is more. Returns how much it was: each frame and each message counts as one, and so does a look for
        more. Of a peer that is gone the first `most` are handled, and what remains is dropped."""
        self._is_due = False
        done = 0
        try:
            has_looked = has_ended = False
            while self._can_hear and done < most and (self._is_last_turn or time.perf_counter() < ends_at):
                done += 1
                if self._arrived:
                    self._on_message(self._arrived.popleft())
                elif self._reader.has_frame:
                    self._arrived.extend(self._reader.take())
                    has_ended = True
                elif has_looked and not self._is_last_turn:
                    break
                else:
                    self._receive()
                    has_looked = True
            if self._is_last_turn:
                self._end(self._lost)
            if self.is_open:
                self._time_frame(has_ended=has_ended)
        except ProtocolError as error:
            self._end(error)
        except BaseException as error:
            self._end(error if isinstance(error, Exception) else None)
            raise
        self._hear()
        return done

    def _receive(self) -> None:
        most_bytes = _RECEIVE_BYTES if self._pace is None else _RECEIVE_AT_ONE_GO_BYTES
        try:
            data, descriptors, flags = _received(self._connection, most_bytes)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        self._descriptors.extend(descriptors)
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > _MOST_DESCRIPTORS:
            raise ProtocolError(
                self.peer, "more descriptors than messages that need one, or than this process can open"
            )
        if data:
            self._reader.add(data)
        else:
            self._end(ProtocolError(self.peer, "it left inside a frame") if self._reader.is_inside_frame else None)

    def _time_frame(self, *, has_ended: bool) -> None:
        is_due = self._can_hear and self._reader.is_inside_frame and not self._has_more
        if self._frame_timer is not None and (has_ended or not is_due):
            self._frame_timer.cancel()
            self._frame_timer = None
        if self._frame_timer is None and self._frame_seconds is not None and is_due:
            error = ProtocolError(self.peer, f"a frame that did not end within {self._frame_seconds:g} s")
            self._frame_timer = self._loop.call_later(self._frame_seconds, self._end, error)

    def _end(self, error: Exception | None) -> None:
        if self.is_open:
            self.close()
            self._on_end(error)

    # --- out ------------------------------------------------------------------------------------------------------

    @property
    def _can_send(self) -> bool:
        return self.is_open and self._lost is None

    def _collect(self) -> None:
        batch, self._batch = self._batch, []
        if batch and self._can_send:
            for frame in frames_of(batch, self._most_bytes):
                self._put_out(frame, None)

    def _put_out(self, frame: bytes, descriptor: int | None) -> None:
        self._outgoing.append((memoryview(frame), descriptor))
        self._count_unsent(len(frame))

    def _count_unsent(self, num_bytes: int) -> None:
        self.unsent_bytes += num_bytes
        if self._pace is not None:
            self._pace.count_unsent(num_bytes)

    def _flush(self) -> None:
        self._collect()
        if self._can_send and not self._is_waiting:
            self._write()

    def _write(self) -> None:
        try:
            while self._outgoing:
                self._write_some()
        except (BlockingIOError, InterruptedError):
            self._wait_until_writable(True)
        except OSError as error:
            self._lose(error)
        else:
            self._wait_until_writable(False)
            if self._ends_when_sent:
                self._end(None)

    def _write_some(self) -> None:
        frame, descriptor = self._outgoing[0]
        rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        # A peer that is gone must not kill this process, however SIGPIPE is handled here.
        sent = self._connection.sendmsg([frame], rights, socket.MSG_NOSIGNAL)
        self._outgoing[0] = frame[sent:], None
        self._count_unsent(-sent)
        if descriptor is not None:
            os.close(descriptor)
        if sent == len(frame):
            self._outgoing.popleft()

    def _lose(self, error: OSError) -> None:
        """No more bytes can be sent. If the peer is gone, its last messages, such as the reason, may still be unread:
        its end follows."""
        if not self._is_listening or not isinstance(error, ConnectionError):
            self._end(error)
            return
        self._lost = error
        self._drop_outgoing()
        self._wait_until_writable(False)

    def _drop_outgoing(self) -> None:
        self._batch = []
        self._count_unsent(-self.unsent_bytes)
        while self._outgoing:
            _, descriptor = self._outgoing.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def _wait_until_writable(self, is_waiting: bool) -> None:
        self._is_waiting = is_waiting
        if self._pace is None:
            self._watch()
        else:
            self._hear()  # perhaps it was not heard because of the answers


def _received(connection: socket.socket, most_bytes: int) -> tuple[bytes, list[int], int]:
    # socket.recv_fds and send_fds ignore their flags (CPython up to 3.12 at least).
    room = socket.CMSG_LEN(_MOST_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, flags, _ = connection.recvmsg(most_bytes, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    return data, list(descriptors), flags

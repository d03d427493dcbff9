"""A session with the daemon that outlives its connections. On one loop.

Requests wait through a lost connection: the link connects again, resumes the session, shares its slabs again and sends
again what was not answered (`messages.py`, rule 5). When that has not worked for `reconnect_seconds`, the requests
fail, but the link keeps them: a slot that they name is the daemon's until it has answered (rule 3). The link goes on
trying, and requests that come later fail after the next attempt that does. So a client that computes and asks for
nothing is back before its lease ends, too."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ..base.address import why_unreached
from ..base.system_words import words_of
from ..disk.forking import Inode, inode_of, not_while_forking
from ..errors import DaemonUnavailableError, ProtocolError
from . import messages
from .channel import Channel
from .peer import check_daemon, program_name
from .window import SharedSlab

_LONGEST_HANDSHAKE_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_LOOKS = 10
_LOOKS_BEFORE_ASKING = 5
_SHORTEST_PATIENCE_SECONDS = 1.0  # a loaded machine takes that long to come back to a process that lives
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5

RequestKind = type[messages.Write | messages.Read | messages.Discard]
Answer = messages.Stored | messages.Full | messages.Failed | messages.Bad | messages.Loaded | messages.Gone
OnLate = Callable[[Answer | None], None]
"""Called with an answer that nobody waits for (any more); with None if the session is over."""


class _RefusedError(ConnectionError):
    """The daemon refuses the session. `is_final`: trying again is of no use."""

    def __init__(self, reason: str, is_final: bool) -> None:
        super().__init__(reason)
        self.is_final = is_final


@dataclass(slots=True)
class _Request:
    """One that the daemon has not answered yet. `answer`: None: nobody waits for it."""

    message: messages.Write | messages.Read | messages.Discard
    on_late: OnLate
    answer: asyncio.Future[Answer] | None = None


class DaemonLink:
    """The client's end of a session, which the message `introduction` opens.

    Attributes:
        max_slab_bytes: the most that the daemon allows the session's slabs to have together.
        on_unavailable: called when all who wait for the daemon must give up, with a function that makes their errors.
        renew_slabs: called before the session is resumed, so that its slabs can be shared again. May raise OSError.
        inodes: the sockets and slabs that a forked child has to give up.
    """

    def __init__(
        self, address: str, introduction: messages.Open, reconnect_seconds: float, daemon_uid: int | None = None
    ) -> None:
        self.address = address
        self.opened: messages.Opened
        self.max_slab_bytes = 0
        self.on_unavailable: Callable[[Callable[[], DaemonUnavailableError]], None] = lambda _: None
        self.renew_slabs: Callable[[], Awaitable[None]] | None = None
        self.inodes: set[Inode] = set()
        self._introduction = introduction
        self._daemon_uid = daemon_uid
        self._program: str  # this client's name and version, from `open` on
        self._channel: Channel | None = None  # set while the session is open on it
        self._greeting: asyncio.Future[Any] | None = None  # what the handshake waits for
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Request] = {}
        self._reaching: list[asyncio.Future[None]] = []  # those waiting until the session is open on a connection
        self._slabs: dict[int, SharedSlab] = {}
        self._reconnect_seconds = reconnect_seconds
        # The longest that a daemon which owes an answer may be silent, or take to resume the session.
        self._patience_seconds = max(_SHORTEST_PATIENCE_SECONDS, reconnect_seconds)
        self._reconnecting: asyncio.Task[None] | None = None
        self._lost_because = "it closed the connection"
        self._lost_since: float | None = None  # since when no request has been answered, connected or not
        self._ended_because: str | None = None  # the session is over for good
        self._is_closing = False  # nobody waits for a daemon that is away
        self._watching: asyncio.Task[None] | None = None  # whether the daemon lives, while it owes answers
        self._was_heard = False

    async def open(self) -> None:
        """Begin the session. DaemonUnavailableError: there is no daemon, or it refuses. ProtocolError: it speaks
        another version, or something else."""
        started = time.monotonic()
        try:
            self._program = program_name()  # read once: a reconnect may have no descriptor left for a file
            answer = await self._connect(self._introduction, _LONGEST_HANDSHAKE_SECONDS)
        except OSError as error:
            waited = time.monotonic() - started
            reason = why_unreached(self.address, error, words_of(error))
            raise DaemonUnavailableError(self.address, waited, reason, "nothing was stored") from error
        if not isinstance(answer, messages.Opened):
            self._drop()
            raise ProtocolError(self.address, f"{type(answer).__name__} instead of Opened")
        self.opened = answer

    def share(self, slab: SharedSlab) -> None:
        self._slabs[slab.number] = slab
        if self._channel is not None:
            self._channel.send_with(messages.Slab(slab.number, slab.num_bytes), slab.descriptor)

    async def reach(self) -> None:
        """Return when the session is open on a connection. DaemonUnavailableError: the daemon has not come back in
        time."""
        if (reason := self._why_never()) is not None:
            raise self._unavailable(reason, 0.0)
        if self._channel is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._reaching.append(future)
            self._reconnect()
            await future

    async def ask(self, kind: RequestKind, *fields: Any, on_late: OnLate = lambda _: None) -> Answer:
        """Send a request and wait for the daemon's answer, through reconnects. Until there is one, the slot that the
        request names is the daemon's. DaemonUnavailableError: it has not come back in time; it may answer later."""
        if (reason := self._why_never()) is not None:
            on_late(None)
            raise self._unavailable(reason, 0.0)
        request = self.submit(kind, *fields, on_late=on_late)
        request.answer = asyncio.get_running_loop().create_future()
        if self._channel is None:
            self._reconnect()
        return await request.answer

    def submit(self, kind: RequestKind, *fields: Any, on_late: OnLate = lambda _: None) -> _Request:
        """Send a request, now and again after each reconnect. `fields`: those of the message, but for its number."""
        number = next(self._numbers)
        request = self._pending[number] = _Request(kind(number, *fields), on_late)
        if self._channel is not None and self._ended_because is None:  # nothing comes after Close
            self._channel.send(request.message)
            self._watch()
        return request

    def _why_never(self) -> str | None:
        """Why no daemon will answer any more, if none will."""
        if self._ended_because is None and self._channel is None and self._is_closing:
            return self._lost_because
        return self._ended_because

    def end_soon(self) -> None:
        """No answer is needed any more, and `close` comes once all requests have ended. Those to a daemon that is away
        fail, now and from now on; one that hangs is given up within seconds."""
        self._is_closing = True
        self._patience_seconds = min(self._patience_seconds, _CLOSE_SECONDS)
        if self._channel is None:
            self._fail_all(self._lost_because, 0.0)
        elif self._watching is not None:  # it is in the midst of a longer look
            self._watching.cancel()
            self._watching = None
            self._watch()

    async def close(self) -> None:
        """End the session: the daemon frees all it stored. Idempotent; never fails, and waits for seconds at most."""
        was_open, self._ended_because = self._channel is not None, "it was closed"
        if self._watching is not None:
            self._watching.cancel()
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait((self._reconnecting,))
        if was_open and self._channel is not None:
            self._greeting = asyncio.get_running_loop().create_future()
            self._channel.send(messages.Close())
            await asyncio.wait((self._greeting,), timeout=_CLOSE_SECONDS)  # without an answer the lease ends by itself
            if self._greeting.done():
                self._greeting.exception()
        self._drop()
        self._fail_all("it was closed", 0.0)

    # --- one connection -------------------------------------------------------------------------------------------

    async def _connect(self, message: messages.Open | messages.Resume, seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await self._introduce(message)
        except TimeoutError:
            raise TimeoutError(f"no answer to {type(message).__name__} within {seconds:g} s") from None

    async def _introduce(self, message: messages.Open | messages.Resume) -> Any:
        with not_while_forking:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            inode = inode_of(connection.fileno())
            self.inodes.add(inode)
        connection.setblocking(False)
        try:
            await self._connect_socket(connection)
            check_daemon(connection, self.address, self._daemon_uid)
            peer = f"the daemon at {self.address}"
            channel = Channel(connection, messages.DaemonMessage, peer, self._receive, self._connection_ended)
        except BaseException:
            connection.close()
            self.inodes.discard(inode)
            raise
        try:
            await self._greet(channel)
            answer = await self._ask(channel, message)
            if not channel.is_open:  # it ended before this was woken, and nobody was told
                raise ConnectionError(self._lost_because)
        except BaseException:
            channel.close()
            raise
        finally:
            self.inodes.discard(inode)
        self.inodes.add(inode)
        self._channel = channel
        return answer

    async def _connect_socket(self, connection: socket.socket) -> None:
        """Waits as long as too many others wait to be accepted, of which no poll tells the end (connect(2), EAGAIN)."""
        while True:
            try:
                connection.connect(self.address)
            except BlockingIOError:
                await asyncio.sleep(_FIRST_PAUSE_SECONDS)
            else:
                return

    async def _greet(self, channel: Channel) -> None:
        try:
            welcome = await self._ask(channel, messages.Hello((messages.VERSION,), self._program))
        except _RefusedError as error:
            if not error.is_final:
                raise
            raise ProtocolError(self.address, messages.with_advice(str(error))) from error
        if not isinstance(welcome, messages.Welcome) or welcome.version != messages.VERSION:
            raise ProtocolError(self.address, f"{welcome!r} instead of a Welcome to version {messages.VERSION}")
        self.max_slab_bytes = welcome.max_slab_bytes

    async def _ask(self, channel: Channel, message: messages.ClientMessage) -> Any:
        self._greeting = asyncio.get_running_loop().create_future()
        channel.send(message)
        try:
            return await self._greeting
        finally:
            self._greeting = None

    def _receive(self, message: Any) -> None:
        self._was_heard = True
        if isinstance(message, messages.Refused):
            if self._greeting is None or self._greeting.done():
                raise ProtocolError(self.address, f"it refuses to go on: {message.reason}")
            self._greeting.set_exception(_RefusedError(message.reason, message.is_final))
        elif isinstance(message, Answer):
            self._answered(message)
        elif isinstance(message, messages.Report):
            pass  # it lives
        elif self._greeting is not None and not self._greeting.done():
            self._greeting.set_result(message)
        else:
            raise ProtocolError(self.address, f"{type(message).__name__} that nobody asked for")

    def _answered(self, answer: Answer) -> None:
        self._lost_since = None
        request = self._pending.pop(answer.request, None)
        if request is None:
            raise ProtocolError(self.address, f"an answer to request {answer.request}, which was not made")
        if request.answer is not None and not request.answer.done():
            request.answer.set_result(answer)
        else:
            request.on_late(answer)

    def _connection_ended(self, error: Exception | None) -> None:
        self._lost_because = "it closed the connection" if error is None else words_of(error)
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_exception(ConnectionError(self._lost_because))
        was_open = self._channel is not None
        self._drop()
        if was_open and self._ended_because is None:
            if self._is_closing:
                self._fail_all(self._lost_because, 0.0)
            else:
                self._reconnect()

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._give_up_if_silent())

    async def _give_up_if_silent(self) -> None:
        """Give up a daemon that owes answers and says nothing at all, though it was asked whether it lives: one that
        hangs keeps its connections. Silence is counted in looks, not by the clock: if this process was stopped itself,
        it reads what the daemon has said meanwhile before the next look."""
        patience_seconds, num_looks = self._patience_seconds, 0
        try:
            while num_looks < _LOOKS:
                self._was_heard = False
                await asyncio.sleep(patience_seconds / _LOOKS)
                if self._channel is None or not self._pending:
                    return
                num_looks = 0 if self._was_heard else num_looks + 1
                if num_looks == _LOOKS_BEFORE_ASKING:
                    self._channel.send(messages.Inspect())
        finally:
            if self._watching is asyncio.current_task():  # else another has taken its place
                self._watching = None
        # It was given its time, so those who wait are told now.
        self._lost_since = self._lost_since or time.monotonic() - patience_seconds
        self._connection_ended(TimeoutError(f"no sign of life for {patience_seconds:g} s"))

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    # --- after it was lost ----------------------------------------------------------------------------------------

    def _reconnect(self) -> None:
        if self._reconnecting is None:
            self._reconnecting = asyncio.get_running_loop().create_task(self._try_until_resumed())

    async def _try_until_resumed(self) -> None:
        """At growing pauses, until the session is resumed or over. Time counts from when the daemon last answered a
        request, so nobody waits for ever for one that comes back and fails at each request; nor is that tried at once.
        """
        is_due = self._lost_since is None
        pause = _FIRST_PAUSE_SECONDS if is_due else _LONGEST_PAUSE_SECONDS
        lost_since = self._lost_since = self._lost_since or time.monotonic()
        ends_at = lost_since + self._reconnect_seconds
        try:
            while not (is_due and await self._try(ends_at - time.monotonic())):
                now = time.monotonic()
                if now >= ends_at or self._ended_because is not None:
                    self._fail_all(self._lost_because, now - lost_since)
                if self._ended_because is not None:
                    return
                await asyncio.sleep(min(pause, ends_at - now) if now < ends_at else pause)
                pause, is_due = min(2 * pause, _LONGEST_PAUSE_SECONDS), True
        finally:
            self._reconnecting = None

    async def _try(self, seconds: float) -> bool:
        """Try once. `seconds`: left until those who wait are told. False: `_lost_because` says why not."""
        try:
            await self._resume(max(_SHORTEST_PATIENCE_SECONDS, seconds) if seconds > 0 else self._patience_seconds)
        except Exception as error:  # noqa: BLE001 - delivered: to everybody who waits, when time is up
            self._drop()  # the session may be open on it already, without its slabs and requests
            self._lost_because = words_of(error)
            if isinstance(error, _RefusedError) and error.is_final:
                self._ended_because = self._lost_because
            return False
        if not self._pending:
            self._lost_since = None
        return True

    async def _resume(self, seconds: float) -> None:
        """Connect again, and send again each request that is not answered; raises why that failed."""
        try:
            if self.renew_slabs is not None:
                await self.renew_slabs()
        except OSError as error:
            raise ConnectionError(f"there is no memory to share with it: {error}") from error
        resume = messages.Resume(self.opened.session, self.opened.token)
        answer = await self._connect(resume, min(seconds, _LONGEST_HANDSHAKE_SECONDS))
        channel = self._channel
        if channel is None or not isinstance(answer, messages.Resumed):
            raise ConnectionError(f"{type(answer).__name__} instead of Resumed")
        for slab in self._slabs.values():
            channel.send_with(messages.Slab(slab.number, slab.num_bytes), slab.descriptor)
        for request in self._pending.values():
            channel.send(request.message)
        self._watch()
        self._end_reaching(None)

    def _fail_all(self, reason: str, waited_seconds: float) -> None:
        """Tell all who wait that they must give up; if the session is over, also that no answer comes any more."""
        for request in self._pending.values():
            answer, request.answer = request.answer, None
            if answer is not None and not answer.done():
                answer.set_exception(self._unavailable(reason, waited_seconds))
        self._end_reaching(lambda: self._unavailable(reason, waited_seconds))
        self.on_unavailable(lambda: self._unavailable(reason, waited_seconds))
        if self._ended_because is not None:
            ended, self._pending = self._pending, {}
            for request in ended.values():
                request.on_late(None)

    def _end_reaching(self, error: Callable[[], Exception] | None) -> None:
        reaching, self._reaching = self._reaching, []
        for future in reaching:
            if not future.done():
                future.set_result(None) if error is None else future.set_exception(error())

    def _unavailable(self, reason: str, waited_seconds: float) -> DaemonUnavailableError:
        if self._ended_because is None:
            return DaemonUnavailableError(self.address, waited_seconds, reason)
        lost = "data that it has acknowledged is lost; the rest is still in memory"
        return DaemonUnavailableError(self.address, waited_seconds, reason, lost)

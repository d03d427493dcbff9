"""One client's connection: which messages it may send now, and when each request runs. For one loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from tierstore.errors import ProtocolError, StorageIOError, StoreFullError
from tierstore.sidecar import messages
from tierstore.sidecar.channel import Channel, Pace

from .limits import waiting_bytes_of
from .registry import Registry
from .report import Reporter
from .sessions import Session
from .slabs import MappedSlab
from .turns import Turn

_log = logging.getLogger("tierstore.daemon")

_MOST_SLABS = 16  # a store has one; each costs the daemon two descriptors, however small it is


class Connection:
    """A client's connection, with what it may do now. Lives on the daemon's loop; nothing blocks. It owns the
    `accepted` socket, and the slabs that came over it: the client shares them again over the next one. `uid`: the
    client's user, as the kernel says. `on_end` is called with this connection when it is over, perhaps twice."""

    def __init__(
        self,
        accepted: socket.socket,
        uid: int,
        registry: Registry,
        reporter: Reporter,
        on_end: Callable[[Connection], None],
    ) -> None:
        self.session: Session | None = None
        self._uid = uid
        self._registry, self._settings = registry, registry.settings
        self._reporter = reporter
        self._on_end = on_end
        self._phase: messages.Phase = "greeting"
        self._slabs: dict[int, MappedSlab] = {}
        self._num_named: Counter[int] = Counter()  # by slab: unanswered requests that name it
        self._is_refused = False
        self._is_entering = False  # a session, which waits for a commit to the index, or for old jobs
        seconds, peer = self._settings.handshake_seconds, f"a client of user {uid}"
        self._turn = Turn(uid, self._take_turn)
        pace = Pace(partial(registry.turns.ask, self._turn), partial(registry.unsent.count, self, uid))
        self._channel = Channel(
            accepted, messages.ClientMessage, peer, self._receive, self._ended, frame_seconds=seconds, pace=pace
        )
        too_late = partial(self.refuse, f"no Hello within {seconds:g} s", is_final=False)
        self._hello_timer = asyncio.get_running_loop().call_later(seconds, too_late)

    @property
    def peer(self) -> str:
        return self._channel.peer if self.session is None else self.session.peer

    @property
    def is_in_lobby(self) -> bool:
        """Whether the client has no session, is not about to have one, and was not refused."""
        return self.session is None and not self._is_entering and not self._is_refused

    @property
    def slab_bytes(self) -> int:
        return sum(each.num_bytes for each in self._slabs.values())

    def refuse(self, reason: str, *, is_final: bool = True) -> None:
        self._is_refused = True
        _log.warning("refused: %s", reason, extra=self._about())
        self._channel.send(messages.Refused(messages.fitting(reason), is_final))
        self._channel.end_when_sent()
        asyncio.get_running_loop().call_later(self._settings.handshake_seconds, self._ended, None)

    def answer(self, answer: messages.DaemonMessage | bytes) -> None:
        """Send an answer, or a frame of one; dropped where the connection is over."""
        if isinstance(answer, bytes):
            self._channel.send_frame(answer)
        else:
            self._channel.send(answer)
        if (slowest := self._registry.unsent.slowest(self._uid)) is not None:
            slowest.cut_off("it does not read its answers")

    def cut_off(self, reason: str) -> None:
        self._ended(ProtocolError(self.peer, reason))

    def hold(self) -> None:
        self._channel.hold()

    def go_on(self) -> None:
        self._channel.go_on()

    def stop_listening(self) -> None:
        self._hello_timer.cancel()
        self._channel.stop_listening()

    def end_when_sent(self) -> None:
        self._channel.end_when_sent()

    def give_up_session(self) -> None:
        self.session = None
        self._ended(None)

    # --- what happens to it ---------------------------------------------------------------------------------------

    def _ended(self, error: Exception | None) -> None:
        if error is not None and not self._is_refused:  # such a client may leave without reading why
            _log.warning("connection lost: %s", error, extra=self._about())
        self._hello_timer.cancel()
        self._slabs.clear()
        self._channel.close()
        self._registry.waiting.remove(self)
        self._registry.turns.remove(self._turn)
        if self.session is not None:
            self._registry.lose(self.session, self)
        self._on_end(self)

    def _about(self) -> dict[str, object]:
        return {"uid": self._uid} if self.session is None else self.session.about()

    def _take_turn(self, most: int, ends_at: float) -> int:
        return self._channel.take_turn(most, ends_at)

    def _receive(self, message: messages.ClientMessage) -> None:
        try:
            messages.check_allowed(self._phase, message, self.peer)
            self._handle(message)
        except ProtocolError as error:
            self.refuse(error.reason)

    def _handle(self, message: messages.ClientMessage) -> None:
        match message:
            case messages.Hello():
                self._greet(message)
            case messages.Open() | messages.Resume():
                self._enter(message)
            case messages.Inspect():
                self._reporter.answer_by(self.answer)
            case messages.Slab():
                self._share(message)
            case messages.Unmap():
                self._unmap(message)
            case messages.Write() | messages.Read() | messages.Discard():
                self._request(message)
            case messages.Close():
                self._channel.stop_listening()  # nothing comes after it
                self._registry.tasks.start(self._guarded(self._close_session()))

    def _greet(self, hello: messages.Hello) -> None:
        self._hello_timer.cancel()
        if messages.VERSION not in hello.versions:
            raise ProtocolError(self.peer, messages.other_version(hello.versions, hello.program))
        self._phase = "lobby"
        program, settings = self._reporter.program, self._settings
        self.answer(messages.Welcome(messages.VERSION, program, settings.slab_bytes, settings.grace_seconds))

    # --- sessions -------------------------------------------------------------------------------------------------

    def _enter(self, message: messages.Open | messages.Resume) -> None:
        if self._is_entering:
            raise ProtocolError(self.peer, "it opens two sessions at once")
        self._is_entering = True
        work = self._open(message) if isinstance(message, messages.Open) else self._resume(message)
        self._registry.tasks.start(self._guarded(work))

    async def _open(self, message: messages.Open) -> None:
        try:
            session, token = await self._registry.open(message, self._uid)
        except (StoreFullError, StorageIOError) as error:
            # The text of the former asks to free a graph, and there is none yet.
            reason = f", its drive has no room: {error.reason}" if isinstance(error, StoreFullError) else f": {error}"
            self.refuse(f"no session can be opened{reason}", is_final=False)
            return
        if not self._channel.is_open:  # it left meanwhile, and nobody else has the token
            await self._registry.end(session, "its client left before it was opened")
            return
        self.session, session.connection = session, self
        self._phase = "session"
        disk, key_base = self._registry.disk, session.disk_key(0)
        figures = disk.session, key_base, session.quota_bytes, disk.usage().io_mode
        self.answer(messages.Opened(session.lease.number, token, *figures))

    async def _resume(self, message: messages.Resume) -> None:
        if not self._channel.is_open:
            return
        session = self._registry.find(message, self._uid)
        if session is None:
            # The same words as for a wrong token, so that guesses do not tell which sessions there are.
            self.refuse("it has no such session: its lease has ended, or its data was cleared")
            return
        self._registry.take_over(session, self)
        self.session = session  # from here on the end of the connection begins the grace period
        await session.wait_for(None)  # rule 4 of messages.py
        if session.is_ended:
            self.refuse("the session has ended")
            return
        if session.connection is not self:  # it left meanwhile, or came back once more
            return
        self._phase = "session"
        self.answer(messages.Resumed())

    async def _close_session(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            await self._registry.end(session, "its client closed it")
        self.answer(messages.Closed())
        self.end_when_sent()

    # --- requests -------------------------------------------------------------------------------------------------

    def _share(self, message: messages.Slab) -> None:
        descriptor = self._channel.take_descriptor()
        is_trusted = self._uid in (0, os.getuid())  # they could end the daemon anyway
        slab = MappedSlab(descriptor, message.num_bytes, self.peer, is_trusted=is_trusted)
        if message.slab in self._slabs:
            raise ProtocolError(self.peer, f"slab {message.slab} twice")
        if len(self._slabs) >= _MOST_SLABS:
            raise ProtocolError(self.peer, f"more than {_MOST_SLABS} slabs")
        shared_bytes = self.slab_bytes + slab.num_bytes
        if shared_bytes > self._settings.slab_bytes:
            raise ProtocolError(self.peer, f"slabs of {shared_bytes} bytes; {self._settings.slab_bytes} are allowed")
        self._slabs[message.slab] = slab

    def _unmap(self, message: messages.Unmap) -> None:
        if self._num_named.pop(message.slab, 0):  # its mapping would stay, without being counted
            raise ProtocolError(self.peer, f"Unmap of slab {message.slab}, which an unanswered request names")
        self._slabs.pop(message.slab, None)

    def _request(self, message: messages.Write | messages.Read | messages.Discard) -> None:
        session = self.session
        if session is None:
            raise ProtocolError(self.peer, "a request without a session")
        if isinstance(message, messages.Discard):
            self._request_discard(session, message)
            return
        if (slab := self._slabs.get(message.slab)) is None:
            raise ProtocolError(self.peer, f"slab {message.slab}, which it has not shared")
        slab.check_range(message.offset, message.num_bytes)
        if isinstance(message, messages.Write) and message.key in session.being_written:
            raise ProtocolError(self.peer, f"record {message.key}, which is being written, once more")
        session.begin_job(message.key)
        self._begin(session, message)
        self._num_named[message.slab] += 1
        lanes, about = self._registry.lanes, (session.lease.number, message.num_bytes)

        def job() -> Coroutine[Any, Any, None]:
            return self._guarded(self._serve(session, message, slab))

        dropped = partial(self._end, session, message)
        if isinstance(message, messages.Write):
            session.being_written.add(message.key)
            start = partial(lanes.write, *about, job, dropped, uid=self._uid, asked_at=time.perf_counter())
            session.writes.add(message.num_bytes, start, dropped)
        else:
            lanes.read(*about, job, dropped, uid=self._uid)

    def _request_discard(self, session: Session, message: messages.Discard) -> None:
        if not session.has_any_of(message.keys):
            self.answer(messages.Gone(message.request))
            return
        self._begin(session, message)
        self._registry.tasks.start(self._guarded(self._discard(session, message)))

    def _begin(self, session: Session, message: messages.Write | messages.Read | messages.Discard) -> None:
        if not self._registry.waiting.begin(session, waiting_bytes_of(message)):
            self._registry.waiting.hold(self, self._uid)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a request. A bug of the daemon's own ends this connection, with an explanation, and no other."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - logged, and the client is told
            self._registry.tasks.note_bug(self._about())
            self.refuse(f"it has failed: {error!r}", is_final=False)

    async def _serve(self, session: Session, message: messages.Write | messages.Read, slab: MappedSlab) -> None:
        try:
            if isinstance(message, messages.Read) or not session.is_ended:
                self.answer(await session.serve(message, slab.range(message.offset, message.num_bytes)))
        except ProtocolError as error:
            self.refuse(error.reason)
        finally:
            self._end(session, message)

    def _end(self, session: Session, message: messages.Write | messages.Read) -> None:
        if isinstance(message, messages.Write):
            session.being_written.discard(message.key)
            session.writes.end(message.num_bytes)
        self._num_named[message.slab] -= 1
        self._registry.waiting.end(session, waiting_bytes_of(message))
        session.end_job(message.key)

    async def _discard(self, session: Session, message: messages.Discard) -> None:
        try:
            await session.wait_for(frozenset(message.keys))  # rule 6
            await session.free(message.keys)
        finally:
            self._registry.waiting.end(session, waiting_bytes_of(message))
        self.answer(messages.Gone(message.request))

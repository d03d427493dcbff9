"""The socket that clients connect to: how it is made, guarded and removed; who may connect, and how many may wait."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import grp
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator, Set
from pathlib import Path

from tierstore.base.address import check_folder, folder_closed_to, unknown_owners
from tierstore.base.system_words import words_of
from tierstore.errors import ConfigError
from tierstore.sidecar.peer import NOT_IN_NAMESPACE, uid_of_peer

from .connection import Connection
from .registry import Registry
from .report import Reporter

_BACKLOG = 128
_LOCK_SECONDS = 5.0
_LOCK_PAUSE_SECONDS = 0.01


def listen(path: Path, group: str | None) -> socket.socket:
    """Make a listening, non-blocking socket at `path`, of mode 0600, or 0660 for a group; its folder too, 0700 or 0750.
    A socket on which nobody listens any more is replaced. ConfigError: a living daemon or something that is no socket
    is there, others could replace the socket, or this user may not give it to the group; nothing is left. Blocks while
    another daemon begins or ends in that folder."""
    _make_folder(path.parent, group)
    with _locked(path):
        _clear_stale(path)
        return _listening(path, group)


def why_kept_out(path: Path, group: str | None, uids: Set[int]) -> str:
    """Why the socket that listens at `path` keeps out these users, though they are allowed, in words; "": it may not.
    A client that it keeps out is told no more than "Permission denied"."""
    if not uids - {0, os.geteuid()}:
        return ""
    if group is None:
        return f"the socket's mode is {stat.S_IMODE(path.stat().st_mode):04o}: give --socket-group too"
    closed = folder_closed_to(path.parent, grp.getgrnam(group).gr_gid)
    return "" if closed is None else f"the group {group} cannot enter {closed}: change its group or mode"


def _listening(path: Path, group: str | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with contextlib.ExitStack() as made:
        made.callback(listener.close)
        try:
            mask = os.umask(0o177)  # nobody gets in between bind and chmod
            try:
                listener.bind(str(path))
            finally:
                os.umask(mask)
            made.callback(path.unlink, missing_ok=True)
            if group is not None:
                _give_to(group, path, 0o660)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            raise ConfigError("socket", str(path), f"it cannot be listened on: {words_of(error)}") from error
        made.pop_all()
    return listener


def _give_to(group: str, place: Path, mode: int) -> None:
    """ConfigError: there is no such group, or this user is not in it."""
    try:
        os.chown(place, -1, grp.getgrnam(group).gr_gid)
    except KeyError:
        raise ConfigError("socket_group", group, "give a group of this system") from None
    except PermissionError as error:
        allowed = f"the daemon's user ({os.geteuid()}) has to be in that group"
        raise ConfigError("socket_group", group, allowed) from error
    place.chmod(mode)


def stop_listening(listener: socket.socket, path: Path) -> None:
    """Close the socket, and remove its file unless another daemon listens there by now. Blocks as `listen`."""
    listener.close()
    with contextlib.suppress(OSError, ConfigError), _locked(path):  # a file that stays is replaced by the next
        if stat.S_ISSOCK(path.lstat().st_mode) and not _is_listened_on(path):  # its folder may be another by now
            path.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One daemon at a time looks whether the socket at `path` is stale, and replaces it: else a second one removes what
    the first has just made. The lock is on a file beside it that only this user can open, and that goes with it:
    anybody who can list a folder could lock that. ConfigError: another daemon has the lock for seconds, or there can be
    none."""
    lock = path.with_name(f"{path.name}.lock")
    ends_at = time.monotonic() + _LOCK_SECONDS
    while (descriptor := _lock(lock)) is None:
        if time.monotonic() >= ends_at:
            raise ConfigError("socket", str(path), f"another process has locked {lock} for {_LOCK_SECONDS:g} s")
        time.sleep(_LOCK_PAUSE_SECONDS)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
        os.close(descriptor)


def _lock(lock: Path) -> int | None:
    """A descriptor that has the lock; None: somebody else has it, or has just removed the file."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError("socket", str(lock), f"it cannot be opened, to be locked: {words_of(error)}") from error
    has_it = False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError("socket", str(lock), "it has to be a file of this user: remove it")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        has_it = os.path.lexists(lock) and os.path.samestat(os.lstat(lock), status)
    except BlockingIOError:
        pass
    except OSError as error:
        raise ConfigError("socket", str(lock), f"it cannot be locked: {words_of(error)}") from error
    finally:
        if not has_it:
            os.close(descriptor)
    return descriptor if has_it else None


def _make_folder(folder: Path, group: str | None) -> None:
    if not os.path.lexists(folder):
        check_folder(folder.parent)  # first, so that nothing is made where others could replace it
        with contextlib.ExitStack() as made:
            try:
                folder.mkdir(mode=0o700)
                made.callback(folder.rmdir)
                if group is not None:
                    _give_to(group, folder, 0o750)
            except FileExistsError:
                pass
            except OSError as error:
                raise ConfigError("socket", str(folder), f"its folder cannot be created: {words_of(error)}") from error
            made.pop_all()
    check_folder(folder)


def _clear_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError("socket", str(path), "there is a file of that name that is not a socket")
    except FileNotFoundError:
        return
    try:
        if _is_listened_on(path):
            raise ConfigError("socket", str(path), "a living daemon listens there")
    except OSError as error:
        raise ConfigError("socket", str(path), f"this socket cannot be examined: {words_of(error)}") from error
    path.unlink(missing_ok=True)


def _is_listened_on(path: Path) -> bool:
    """Whether a process listens there; raises OSError where that cannot be told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:  # its backlog is full: the daemon may hang, but it is there
            return True
    return True


_log = logging.getLogger("tierstore.daemon")

_ACCEPT_AGAIN_SECONDS = 0.1
_MOST_IN_LOBBY = 64  # a connection takes two descriptors


class Acceptor:
    """Holds every connection until it is over."""

    def __init__(self, registry: Registry, reporter: Reporter) -> None:
        # Of a user namespace: one number that stands for all users outside is nobody's.
        self._allowed_uids = ({0, os.getuid()} | registry.settings.allowed_uids) - unknown_owners()
        self._registry, self._reporter = registry, reporter
        self._connections: dict[Connection, None] = {}  # the oldest first

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
                self._take_in(accepted)
            except OSError as error:  # no descriptor is left: others wait until one is
                _log.warning("no more connections: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)

    def stop_listening(self) -> None:
        """Take no more requests from any client; their answers are still sent."""
        for connection in self._connections:
            connection.stop_listening()

    def end_when_sent(self) -> None:
        for connection in list(self._connections):
            connection.end_when_sent()

    def _take_in(self, accepted: socket.socket) -> None:
        try:
            uid = uid_of_peer(accepted)
            connection = Connection(accepted, uid, self._registry, self._reporter, self._remove)
        except OSError:
            accepted.close()
            raise
        self._make_room_in_lobby()
        self._connections[connection] = None
        if uid not in self._allowed_uids:
            connection.refuse(self._why_not(uid), is_final=False)

    def _why_not(self, uid: int) -> str:
        if uid in unknown_owners():
            return f"{NOT_IN_NAMESPACE.format(uid=uid)}: run the training in the namespace of the daemon"
        return f"user {uid} may not use this daemon (see --allow-uid)"

    def _make_room_in_lobby(self) -> None:
        """Connections without a session may stay, but not keep others out: the oldest makes room for the newest."""
        lobby = [each for each in self._connections if each.is_in_lobby]
        if len(lobby) >= _MOST_IN_LOBBY:
            lobby[0].refuse("too many connections without a session, of which this was the oldest", is_final=False)

    def _remove(self, connection: Connection) -> None:
        self._connections.pop(connection, None)

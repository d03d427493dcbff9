"""The unix socket that clients connect to: how it is made, guarded and removed."""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
from pathlib import Path

from tierstore.base.address import check_folder
from tierstore.base.system_words import words_of
from tierstore.errors import ConfigError

__all__ = ["listen", "stop_listening"]

_BACKLOG = 128


def listen(path: Path, group: str | None) -> socket.socket:
    """Make a listening, non-blocking socket at `path`.

    A missing folder is made for the user alone (mode 0700), or for the group too (0750). The socket gets mode 0600, or
    0660. A socket on which nobody listens any more is replaced.

    Raises:
        ConfigError: a living daemon or something that is no socket is there, or others could replace the socket.
    """
    gid = None if group is None else _gid_of(group)
    _make_folder(path.parent, gid)
    _clear_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        mask = os.umask(0o177)  # nobody gets in between bind and chmod
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        if gid is not None:
            os.chown(path, -1, gid)
            path.chmod(0o660)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError("socket", str(path), f"it cannot be listened on: {words_of(error)}") from error
    return listener


def stop_listening(listener: socket.socket, path: Path) -> None:
    """Close the socket, and remove its file unless another daemon listens there by now."""
    listener.close()
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(path.lstat().st_mode) and not _is_listened_on(path):  # its folder may be another by now
            path.unlink()


def _gid_of(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError("socket_group", group, "give a group of this system") from None


def _make_folder(folder: Path, gid: int | None) -> None:
    if not os.path.lexists(folder):
        check_folder(folder.parent)  # first, so that nothing is made where others could replace it
        try:
            folder.mkdir(mode=0o700)
            if gid is not None:
                os.chown(folder, -1, gid)
                folder.chmod(0o750)
        except FileExistsError:
            pass
        except OSError as error:
            raise ConfigError("socket", str(folder), f"its folder cannot be created: {words_of(error)}") from error
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

"""Who is on the other end of a unix socket, as the kernel says, and which users' daemons a client trusts."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from ..base.address import SYSTEM_ADDRESS, is_of_root_alone, trusted_uid, unknown_owners
from ..base.config import version_of

NOT_IN_NAMESPACE = "its user is not in this user namespace: {uid} stands for every user outside, whoever it is"
"""Of a peer, for people. Such a number is never compared with one that is trusted, nor advised."""

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid (unix(7))


def program_name() -> str:
    """Who this process is, for the other end."""
    return f"tierstore {version_of('tierstore') or '(not installed)'}, process {os.getpid()}"


def uid_of_peer(connection: socket.socket) -> int:
    """The user whose process connected, or listens, as the kernel says (SO_PEERCRED, unix(7))."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def check_daemon(connection: socket.socket, address: str, daemon_uid: int | None) -> None:
    """Check whose daemon a client has connected to, before a word is said. Reads two files of the kernel's.

    A client trusts the daemons of its own user and of root; also that of the user who has the folder of
    `SYSTEM_ADDRESS` if it connects there: root alone can have made that folder. `daemon_uid`: another that is trusted;
    None: the one that `TIERSTORE_DAEMON_UID` names, if any. PermissionError: a user who is not trusted, or who is not
    known in this user namespace."""
    uid, trusted = uid_of_peer(connection), trusted_uid(daemon_uid)
    if uid in unknown_owners():
        raise PermissionError(
            f"{NOT_IN_NAMESPACE.format(uid=uid)}. Map the daemon's user into the namespace, or run the daemon in it"
        )
    if uid in (trusted, 0, os.geteuid(), _uid_of_system_folder(address)):
        return
    raise PermissionError(
        f"it is a daemon of user {uid}, and this client trusts those of its own user ({os.geteuid()}) and of root (0): "
        f"if that is the right one, pass daemon_uid={uid} (to a command: --daemon-uid {uid}) or set "
        f"TIERSTORE_DAEMON_UID={uid}"
    )


def _uid_of_system_folder(address: str) -> int | None:
    folder = Path(SYSTEM_ADDRESS).parent
    if Path(address).parent != folder or not is_of_root_alone(folder.parent):
        return None
    try:
        return folder.lstat().st_uid
    except OSError:
        return None

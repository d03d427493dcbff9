"""Where a daemon of this host listens, where its clients look for it if nobody names an address, and who could replace
it.

A daemon of root listens at `SYSTEM_ADDRESS`, that of another user at `tierstore/tierstore.sock` in the directory that
`XDG_RUNTIME_DIR` names; where others could change that, or it does not exist, at `/tmp/tierstore-UID/tierstore.sock`,
if that folder is the user's alone: somebody else's daemon must not get the tensors. `TIERSTORE_SOCKET` comes before
all. Whose daemon answers is checked at each connection (`sidecar/peer.py`)."""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, ConfigTypeError, DaemonUnavailableError

SYSTEM_ADDRESS = "/run/tierstore/tierstore.sock"
"""Where a daemon of root listens by default."""

_VARIABLE = "TIERSTORE_SOCKET"
_UID_VARIABLE = "TIERSTORE_DAEMON_UID"
_TEMPORARY = Path("/tmp")
_NAME = "tierstore.sock"
_UIDS = range(2**32 - 1)
_MOST_LINKS = 40  # as the kernel follows
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_WHICH_UID = "give the number of the daemon's user"


def default_address() -> str:
    """Where a daemon of this user listens by default."""
    if os.geteuid() == 0:
        return SYSTEM_ADDRESS
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime, "tierstore") if os.path.isabs(runtime) and _is_private(Path(runtime)) else _folder_in_tmp()
    return str(folder / _NAME)


def places_to_look() -> tuple[str, ...]:
    """Where a client looks for a daemon by default, in this order."""
    return tuple(dict.fromkeys((default_address(), SYSTEM_ADDRESS)))


def find_address() -> str:
    """The address of the daemon to use, if nobody names one. Whether a daemon answers there is not tried.
    DaemonUnavailableError: there is no socket in any of the places."""
    if named := os.environ.get(_VARIABLE):
        return named
    places = places_to_look()
    for place in places:
        if _may_be_used(Path(place).parent) and may_exist(place):
            return place
    reason = f"there is no socket. Start one with: {start_line(places[0])}"
    if not _may_be_used(folder := Path(places[0]).parent):
        reason = f"{folder} does not belong to this user, or others can write to it"
    raise DaemonUnavailableError(" or ".join(places), 0.0, reason, "")


def start_line(address: str) -> str:
    """The command that starts a daemon of this user at this address."""
    option = "" if address == default_address() else f" --socket {shlex.quote(address)}"
    return f"tierstore serve --path DIRECTORY{option}"


def why_unreached(address: str, error: OSError, words: str) -> str:
    """Why nobody could be connected to, and what to do. `words`: the error's."""
    if not isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        return words
    if os.path.exists(address) and not Path(address).is_socket():  # False where the folder cannot be read
        return "what has that name is not a socket"
    return f"{words}. Start one with: {start_line(address)}"


def trusted_uid(daemon_uid: int | None) -> int | None:
    """The user whose daemon a client trusts beside its own user's and root's: `daemon_uid`, else by the environment.
    ConfigError: it is no number of a user."""
    if daemon_uid is not None:
        if type(daemon_uid) is not int:
            raise ConfigTypeError("daemon_uid", daemon_uid, _WHICH_UID)
        if daemon_uid not in _UIDS:
            raise ConfigError("daemon_uid", daemon_uid, _WHICH_UID)
        return daemon_uid
    named = os.environ.get(_UID_VARIABLE, "")
    if not named:
        return None
    if not (named.isascii() and named.isdigit() and len(named) < 11 and int(named) in _UIDS):
        raise ConfigError(_UID_VARIABLE, named, _WHICH_UID)
    return int(named)


def check_folder(folder: Path) -> None:
    """ConfigError: somebody beside this user and root could replace a socket in this folder, or it does not exist."""
    if not _may_be_used(folder):
        allowed = "it belongs to another user, or others can write to it: remove it, or give another address"
        raise ConfigError("socket", str(folder), allowed)
    try:
        way = who_could_replace(folder)
    except OSError as error:
        raise ConfigError("socket", str(folder), f"its folder cannot be examined: {error}") from error
    if way:
        whose = f"every folder up to / has to belong to this user ({os.geteuid()}) or to root"
        others = "others may write to none but a sticky one like /tmp: change owner or mode, or give another address"
        raise ConfigError("socket", str(folder), f"{way}, so the socket could be replaced: {whose}, and {others}")


def _may_be_used(folder: Path) -> bool:
    """Whether it is not the folder in /tmp, or does not exist, or is this user's alone."""
    return folder != _folder_in_tmp() or not os.path.lexists(folder) or _is_private(folder)


def _folder_in_tmp() -> Path:
    return _TEMPORARY / f"tierstore-{os.geteuid()}"


def _is_private(folder: Path) -> bool:
    """Whether it is a directory of this user, to which nobody else can write. A link is none."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not status.st_mode & _WRITABLE_BY_OTHERS


def may_exist(address: str) -> bool:
    """Whether something is there; also if this user may not look: then connecting tells why."""
    try:
        os.lstat(address)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def who_could_replace(folder: Path) -> str:
    """How another user could replace what this user has in `folder`, in words; "" if only root could. OSError: a folder
    on the way does not exist, or may not be looked at.

    As sshd does for its keys, it looks at every folder and link from / on. Each has to belong to this user or to root.
    Others may write to none but a sticky one, like /tmp. In a user namespace root of the host, which looks like others
    there, is trusted."""
    trusted = {0, os.geteuid()} | unknown_owners()
    for place, status in _way_to(folder):
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid not in trusted:
            return f"{place} belongs to another user ({status.st_uid}, mode {mode:04o})"
        if not stat.S_ISLNK(status.st_mode) and mode & _WRITABLE_BY_OTHERS and not mode & stat.S_ISVTX:
            return f"others can write to {place} (of user {status.st_uid}, mode {mode:04o})"
    return ""


def folder_closed_to(folder: Path, gid: int) -> Path | None:
    """The first folder on the way into `folder` that a group may not enter, for which others are kept out too; None:
    there is none. OSError: as `who_could_replace`."""
    for place, status in _way_to(folder):
        may_enter = stat.S_IXGRP if status.st_gid == gid else stat.S_IXOTH
        if stat.S_ISDIR(status.st_mode) and not status.st_mode & may_enter:
            return place
    return None


def is_of_root_alone(folder: Path) -> bool:
    """Whether only root can make or replace anything in `folder`. False also where that cannot be told."""
    try:
        return all(
            status.st_uid == 0 and (stat.S_ISLNK(status.st_mode) or not status.st_mode & _WRITABLE_BY_OTHERS)
            for _, status in _way_to(folder)
        )
    except OSError:
        return False


def unknown_owners() -> set[int]:
    """The user that stands for all who are not in this user namespace (user_namespaces(7)), such as root of the host.
    Nothing if all users are in it, or if that number is a user's of its own here."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        unknown = int(Path("/proc/sys/fs/overflowuid").read_text())
    except OSError:
        return set()
    ranges = [range(first, first + count) for first, _, count in (map(int, line.split()) for line in lines)]
    return set() if any(unknown in each for each in ranges) else {unknown}


def _way_to(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each folder and link from / on, links followed, with its own status (lstat)."""
    place = Path("/")
    left = list(folder.absolute().parts)
    num_links = 0
    while left:
        name = left.pop(0)
        if name == "..":  # of a folder, never of a link
            place = place.parent
            continue
        status = (place / name).lstat()
        yield place / name, status
        if not stat.S_ISLNK(status.st_mode):
            place /= name
            continue
        num_links += 1
        if num_links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        left[:0] = Path(os.readlink(place / name)).parts

"""A daemon listens only where nobody but its user and root can replace the socket. Real folders of real users."""

import ctypes
import grp
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.daemon.clients import client_of
from tests.daemon.conftest import StartDaemon
from tierstore.base.address import unknown_owners, who_could_replace
from tierstore.daemon.acceptor import listen, stop_listening
from tierstore.errors import ConfigError
from tierstore.sidecar.peer import check_daemon

OWN, OTHER = 64_987, 64_988
"""Ordinary users whom no machine has."""

GROUP = max(grp.getgrall(), key=lambda each: each.gr_gid != 0)
"""Not that of root's folders."""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of other users, and become one"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


class Layout(NamedTuple):
    """What is below an empty folder of root's: (path, owner or None for the daemon's user, mode or a link's target)."""

    made: tuple[tuple[str, int | None, int | str], ...]
    socket: str
    words: tuple[str, ...] = ()


LAYOUTS = {
    "own": Layout((("d", None, 0o700),), "d/s"),
    "own, sticky": Layout((("d", None, 0o1777),), "d/s"),
    "missing, in an own one": Layout((("d", None, 0o700),), "d/new/s"),
    "own, in one like /tmp": Layout((("t", 0, 0o1777), ("t/d", None, 0o700)), "t/d/s"),
    "missing, in one like /tmp": Layout((("t", 0, 0o1777),), "t/new/s"),
    "one like /tmp itself": Layout((("t", 0, 0o1777),), "t/s"),
    "own, behind a link of root's": Layout((("d", None, 0o700), ("l", 0, "../{base}/d")), "l/s"),
    "own, by a way back": Layout((("d", None, 0o700), ("e", None, 0o700)), "e/../d/s"),
    "another's": Layout((("d", OTHER, 0o755),), "d/s", ("{d} belongs to another user (64988, mode 0755)",)),
    "another's, sticky": Layout((("d", OTHER, 0o1777),), "d/s", ("{d} belongs to another user (64988, mode 1777)",)),
    "own, behind another's link": Layout((("d", None, 0o700), ("l", OTHER, "d")), "l/s", ("{l} belongs to another",)),
    "own, behind a link in another's": Layout(
        (("d", None, 0o700), ("o", OTHER, 0o755), ("o/l", None, "../d")), "o/l/s", ("{o} belongs to another",)
    ),
    "own, in another's": Layout((("o", OTHER, 0o755), ("o/d", None, 0o700)), "o/d/s", ("{o} belongs to another",)),
    "own, in one where all can write": Layout(
        (("o", 0, 0o777), ("o/d", None, 0o700)), "o/d/s", ("others can write to {o} (of user 0, mode 0777)",)
    ),
    "own, where all can write": Layout((("d", None, 0o777),), "d/s", ("others can write to {d}",)),
    "own, where a group can write": Layout((("d", None, 0o770),), "d/s", ("others can write to {d}",)),
    "missing, in another's": Layout((("o", OTHER, 0o777),), "o/new/s", ("{o} belongs to another",)),
    "missing, where all can write": Layout((("o", 0, 0o777),), "o/new/s", ("others can write to {o}",)),
    "behind links in a circle": Layout((("l", None, "m"), ("m", None, "l")), "l/s", ("cannot be examined",)),
}


def make(layout: Layout, base: Path, user: int) -> None:
    base.mkdir()
    base.chmod(0o755)
    for name, owner, what in layout.made:
        if isinstance(what, str):
            (base / name).symlink_to(what.format(base=base.name))
        else:
            (base / name).mkdir()
            (base / name).chmod(what)
        os.chown(base / name, user if owner is None else owner, user, follow_symlinks=False)


def verdict(address: Path, group: str | None = None) -> str:
    """What the daemon would say that is told to listen there; "" if it listens."""
    try:
        listener = listen(address, group)
    except ConfigError as error:
        return str(error)
    stop_listening(listener, address)
    return ""


def as_user(user: int, ask: Callable[[], str]) -> str:
    """The answer of a forked child that is this user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.write(writing, ask().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("user", [0, OWN], ids=["root", "user"])
def test_daemon_listens_only_where_nobody_else_can_replace_its_socket(user: int, short_directory: Path) -> None:
    short_directory.chmod(0o755)
    wrong = {}
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        base = short_directory / str(number)
        make(layout, base, user)
        before = sorted(base.rglob("*"))
        said = as_user(user, lambda place=base / layout.socket: verdict(place))  # type: ignore[misc]
        words = [word.format(**{each: base / each for each in "dlot"}) for word in layout.words]
        if bool(said) != bool(words) or not all(word in said for word in words):
            wrong[name] = said
        if words and sorted(base.rglob("*")) != before:
            wrong[name] = "it has left something"
        if words and "examined" not in said and "give another address" not in said:
            wrong[name] = f"no advice: {said}"
    assert not wrong


@pytest.mark.parametrize("name", ["s", "new/s"])
def test_group_that_the_daemon_s_user_is_not_in_is_refused_and_nothing_is_left(
    name: str, short_directory: Path
) -> None:
    os.chown(short_directory, OWN, OWN)
    group = grp.getgrgid(0).gr_name
    said = as_user(OWN, lambda: verdict(short_directory / name, group))
    assert said == f"socket_group={group!r} cannot be used: the daemon's user ({OWN}) has to be in that group"
    assert list(short_directory.iterdir()) == []


@pytest.mark.parametrize(
    ("modes", "group_of_socket", "uids", "words"),
    [
        pytest.param((0o755, 0o750), True, {OTHER}, (), id="all may enter"),
        pytest.param((0o755, 0o755), True, {OTHER}, (), id="so may others"),
        pytest.param((0o755, 0o700), True, {OTHER}, ("cannot enter {d}/e: ",), id="closed folder"),
        pytest.param((0o700, 0o750), True, {OTHER}, ("cannot enter {d}: ",), id="closed further up"),
        pytest.param((0o755, 0o755), False, {OTHER}, ("mode is 0600", "--socket-group"), id="no group"),
        pytest.param((0o700, 0o700), True, {0}, (), id="nobody to let in"),
        pytest.param((0o755, 0o755), False, set(), (), id="alone"),
    ],
)
def test_daemon_whose_socket_keeps_out_users_that_it_allows_says_so_when_it_is_ready(
    start_daemon: StartDaemon,
    short_directory: Path,
    modes: tuple[int, int],
    group_of_socket: bool,
    uids: set[int],
    words: tuple[str, ...],
) -> None:
    """A client would be told nothing but "Permission denied"."""
    short_directory.chmod(0o755)
    place = short_directory
    for name, mode in zip("de", modes, strict=True):
        place /= name
        place.mkdir()
        place.chmod(mode)
        os.chown(place, 0, GROUP.gr_gid)
    options = {"socket_group": GROUP.gr_name} if group_of_socket else {}
    daemon = start_daemon(socket=place / "s", allow_uid=sorted(uids), **options)
    assert daemon.stop() == 0
    told = [line for line in daemon.log.splitlines() if "kept out" in line]
    assert len(told) == bool(words), daemon.log
    assert all(word.format(d=short_directory / "d") in told[0] for word in words)


def test_in_a_user_namespace_the_root_of_the_host_is_trusted() -> None:
    """As in many containers of ordinary users: /tmp belongs to nobody there."""

    def look() -> str:
        if ctypes.CDLL(None).unshare(0x10000000):  # CLONE_NEWUSER
            return "refused"
        return f"{os.stat('/tmp').st_uid in unknown_owners()}, {who_could_replace(Path('/tmp'))!r}"

    said = as_user(OWN, look)
    if said == "refused":
        pytest.skip("this kernel lets no ordinary user make a user namespace")
    assert said == "True, ''"
    assert not unknown_owners()


def test_user_outside_the_namespace_is_never_trusted_nor_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number stands for all of them, so whoever trusts it trusts every user of the host."""
    monkeypatch.setenv("TIERSTORE_DAEMON_UID", "")

    def connect() -> str:
        ours, theirs = socket.socketpair()
        if ctypes.CDLL(None).unshare(0x10000000):  # CLONE_NEWUSER
            return "refused"
        (outside,) = unknown_owners()
        for daemon_uid in (None, outside):
            try:
                check_daemon(ours, "/a/socket", daemon_uid)
            except PermissionError as error:
                said = str(error)
                if "every user outside" not in said or "daemon_uid" in said or "DAEMON_UID" in said:
                    return said
            else:
                return f"{daemon_uid} is trusted"
        theirs.close()
        return "never"

    said = as_user(OWN, connect)
    if said == "refused":
        pytest.skip("this kernel lets no ordinary user make a user namespace")
    assert said == "never"


SERVE_UNMAPPED = """
import ctypes, os, sys
from pathlib import Path
from tierstore.daemon.options import ServeSettings
from tierstore.daemon.server import serve

if ctypes.CDLL(None).unshare(0x10000000):  # CLONE_NEWUSER
    sys.exit("refused by the kernel")
path, socket = map(Path, sys.argv[1:])
serve(ServeSettings((path,), socket=socket, allowed_uids=frozenset({os.getuid()})))
"""


def test_client_outside_the_daemon_s_namespace_is_refused_though_it_has_the_daemon_s_number(
    start_daemon: StartDaemon, short_directory: Path
) -> None:
    """No user is mapped there: the daemon, the client and every other user are one number, which is even allowed."""
    daemon = start_daemon(socket=short_directory / "s", program=SERVE_UNMAPPED, wait=False)
    try:
        daemon.wait_until_ready()
        with client_of(daemon) as client:
            assert client.is_refused("stands for every user outside", "run the training in the namespace")
    except AssertionError:
        if "refused by the kernel" in daemon.log:
            pytest.skip("this kernel lets nobody make a user namespace")
        raise

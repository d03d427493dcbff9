"""Whoever listens at the address may be somebody else: a client asks the kernel whose daemon it is before it speaks."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.daemon import wire
from tests.daemon.conftest import StartDaemon, tierstore
from tests.daemon.peer import Peer, opened_disk
from tierstore import DaemonUnavailableError, TierStore
from tierstore.errors import ConfigError
from tierstore.sidecar import peer as peers
from tierstore.sidecar.inspection import inspect_daemon

UID = 64_987
"""Of an ordinary user whom no machine has."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as another user")


@contextmanager
def listening_as(uid: int, path: Path) -> Iterator[socket.socket]:
    """A socket of another user's: the kernel notes who calls listen(2). Anybody can connect, and nobody answers."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        os.seteuid(uid)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        yield listener


def all_heard(listener: socket.socket) -> list[bytes]:
    """What those said who have connected so far; they are gone."""
    listener.setblocking(False)
    heard = []
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return heard
        with connection:
            heard.append(connection.recv(65536))


@needs_root
def test_daemon_of_another_user_is_not_spoken_to(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = short_directory / "s"
    with listening_as(UID, address) as listener:
        for connect in (TierStore.connect, inspect_daemon):
            with pytest.raises(
                DaemonUnavailableError, match=rf"user {UID}.*own user \(0\).*daemon_uid={UID}"
            ) as caught:
                connect(address)
            assert isinstance(caught.value.__cause__, PermissionError)
        with pytest.raises(DaemonUnavailableError):
            TierStore.connect(address, daemon_uid=UID + 1)
        for command in (("stat",), ("top", "--iterations=1")):
            done = tierstore(*command, f"--socket={address}", COLUMNS="400")
            assert done.returncode == 1
            assert f"a daemon of user {UID}" in done.stdout + done.stderr
        assert all_heard(listener) == [b""] * 5, "connected, and not a word said"
        for number, given in enumerate(({"daemon_uid": UID}, {})):
            monkeypatch.setenv("TIERSTORE_DAEMON_UID", str(UID) if number else "")
            with pytest.raises(DaemonUnavailableError, match="does not answer"):
                inspect_daemon(address, seconds=0.1, **given)  # type: ignore[arg-type]
            assert all(all_heard(listener)), "one that is trusted is spoken to"


@needs_root
def test_daemon_of_a_trusted_user_serves(start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of root's here, for a client that is not root."""
    daemon = start_daemon(allow_uid=UID)
    daemon.let_everybody_connect()
    monkeypatch.setattr(os, "geteuid", lambda: UID)
    assert inspect_daemon(daemon.socket)


@needs_root
async def test_false_daemon_in_the_place_of_a_lost_one_gets_nothing(peer: Peer, short_directory: Path) -> None:
    """It can take the place at any time, also after the folder was looked at: so each connection is looked at."""
    real, aside = Path(peer.address), short_directory / "aside"
    async with opened_disk(peer) as (disk, guest):
        with listening_as(UID, short_directory / "false") as listener:
            real.rename(aside)
            (short_directory / "false").rename(real)
            guest.leave()
            listener.setblocking(True)
            connection, _ = await asyncio.to_thread(listener.accept)
            with connection:
                assert connection.recv(65536) == b""
            real.unlink()
            aside.rename(real)
        again = await peer.guest()
        await again.welcome(wire.Resume, wire.Resumed())
        await again.expect(wire.Slab)
        assert disk.usage().num_records == 0


@needs_root
def test_owner_of_the_folder_that_root_has_made_is_trusted_there_alone(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under systemd: the daemon has a user of its own, and root has made /run/tierstore for it."""
    made = Path(f"/run/tierstore-test-{os.getpid()}")
    made.mkdir(mode=0o755)
    try:
        os.chown(made, UID, UID)
        monkeypatch.setattr(peers, "SYSTEM_ADDRESS", str(made / "s"))
        for folder, is_trusted in ((made, True), (short_directory, False)):
            with listening_as(UID, folder / "s") as listener:
                with pytest.raises(DaemonUnavailableError, match="does not answer" if is_trusted else "daemon of user"):
                    inspect_daemon(folder / "s", seconds=0.1)
                assert [bool(each) for each in all_heard(listener)] == [is_trusted]
        os.chown(made, UID + 1, UID)
        (made / "s").unlink()
        with listening_as(UID, made / "s"), pytest.raises(DaemonUnavailableError, match="daemon of user"):
            inspect_daemon(made / "s", seconds=0.1)
        # In a folder like /tmp somebody else could have made it.
        os.chown(short_directory, UID, UID)
        monkeypatch.setattr(peers, "SYSTEM_ADDRESS", str(short_directory / "t"))
        with listening_as(UID, short_directory / "t"), pytest.raises(DaemonUnavailableError, match="daemon of user"):
            inspect_daemon(short_directory / "t", seconds=0.1)
    finally:
        (made / "s").unlink(missing_ok=True)
        made.rmdir()


@pytest.mark.parametrize("given", ["0", -1, 2**32, True, 1.0])
def test_what_is_no_user_is_refused(given: object, short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="daemon_uid"):
        TierStore.connect(short_directory / "s", daemon_uid=given)  # type: ignore[arg-type]
    monkeypatch.setenv("TIERSTORE_DAEMON_UID", f"{given}x")
    with pytest.raises(ConfigError, match="TIERSTORE_DAEMON_UID"):
        TierStore.connect(short_directory / "s")

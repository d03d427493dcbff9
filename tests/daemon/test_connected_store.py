"""What a store of a daemon has to cope with beside the daemon's death."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest
import torch

from tests.daemon.conftest import StartDaemon
from tierstore import DaemonUnavailableError, StoreFullError, TierStore, wire

MIB = 2**20


def test_relative_address_is_found_again_from_another_directory(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_daemon()
    monkeypatch.chdir(daemon.socket.parent)
    with TierStore.connect(daemon.socket.name, host_bytes=0, reconnect_seconds=20) as store:
        handle = store.put(torch.arange(MIB))
        store.flush()
        monkeypatch.chdir("/")
        daemon.kill()
        start_daemon(daemon.path, daemon.socket)
        assert torch.equal(store.get(handle), torch.arange(MIB))


def test_no_room_is_room_again_when_another_client_has_freed_it(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(disk_bytes=32 * MIB, codec="none")
    with (
        TierStore.connect(daemon.socket, host_bytes=0) as neighbour,
        TierStore.connect(daemon.socket, host_bytes=0) as store,
    ):
        theirs = neighbour.put(torch.zeros(24 * MIB, dtype=torch.uint8))
        neighbour.flush()
        mine = store.put(torch.ones(16 * MIB, dtype=torch.uint8))
        with pytest.raises(StoreFullError) as caught:
            store.flush()
        assert caught.value.disk_bytes >= 24 * MIB, "the daemon's figures: this client holds nothing"
        del theirs
        neighbour.flush()
        store.flush()
        assert store.stats().disk_bytes == 16 * MIB
        assert store.get(mine).all()


class FickleDaemon:
    """Answers `Opened` and leaves in the same moment; then it refuses to go on with the session."""

    def __init__(self, address: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the client may leave at any time, and the test may end
            self._talk(wire.Opened(1, b"t" * 32, 0, 0, MIB, "none"))
            self._talk(wire.Refused("it has forgotten everything"))

    def _talk(self, last_word: wire.DaemonMessage) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(20)
            connection.recv(4096)
            connection.sendall(wire.frame_of([wire.Welcome(1, "fickle", 2**40, 60.0)]))
            connection.recv(4096)
            connection.sendall(wire.frame_of([last_word]))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


def test_daemon_that_leaves_as_soon_as_the_session_is_open_is_noticed(short_directory: Path) -> None:
    """The end comes while the client is about to be told of the beginning; `connect` or the next request says so."""
    address = short_directory / "t.sock"
    daemon = FickleDaemon(address)
    try:
        with pytest.raises(DaemonUnavailableError, match=r"it closed the connection|forgotten everything"):
            with TierStore.connect(address, host_bytes=0, reconnect_seconds=60) as store:
                store.put(torch.ones(MIB))
                store.flush()
    finally:
        daemon.close()

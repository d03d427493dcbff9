"""What is read of sessions after a kill: sound leases, whatever lies beside them."""

from __future__ import annotations

import io

import msgspec
import pytest
import torch

from tests.daemon.conftest import StartDaemon
from tests.daemon.test_survival import sessions_of
from tierstore import DaemonUnavailableError, TierStore
from tierstore.daemon.sessions import COUNTER, KEY_BITS, kept_leases, new_lease
from tierstore.disk.home import FOLDER_NAME
from tierstore.disk.index import Index, map_bytes_for
from tierstore.disk.operations import PutLease

LEASE, TOKEN = new_lease(3, 0, "trainer", None, 1)
SOUND = msgspec.msgpack.encode(LEASE)
MOST = 2 ** (64 - KEY_BITS) - 1


def test_sound_lease_is_found_and_resumed_by_its_token() -> None:
    found = kept_leases({COUNTER: msgspec.msgpack.encode(7), 3: SOUND})
    assert (found.leases, found.next_number, found.damaged) == ({3: LEASE}, 7, [])
    assert found.leases[3].is_resumed_by(TOKEN, 0)


@pytest.mark.parametrize(
    ("number", "blob"),
    [
        pytest.param(4, SOUND, id="another's"),
        pytest.param(3, SOUND[:-1], id="cut"),
        pytest.param(3, b"", id="empty"),
        pytest.param(3, SOUND.replace(b"trainer", b"\xff\xff\xff\xff\xff\xff\xff"), id="no text"),
        pytest.param(3, b"\x87\xa1x" + b"\x91" * 5000, id="nested"),
        pytest.param(2**40, msgspec.msgpack.encode(msgspec.structs.replace(LEASE, number=2**40)), id="too high"),
    ],
)
def test_damaged_lease_is_named_and_the_others_are_found(number: int, blob: bytes) -> None:
    other, _ = new_lease(2, 0, "other", None, 1)
    found = kept_leases({2: msgspec.msgpack.encode(other), number: blob})
    assert (found.leases, found.damaged) == ({2: other}, [number])
    assert found.next_number == (number if number <= MOST else 2) + 1


@pytest.mark.parametrize("counter", [b"", b"\xc0", b"\x03", b"\x00", b"\xff", msgspec.msgpack.encode(2**63)])
def test_damaged_counter_gives_no_number_twice(counter: bytes) -> None:
    assert kept_leases({COUNTER: counter, 3: SOUND}).next_number == 4


def test_daemon_with_a_damaged_lease_starts_without_it(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with TierStore.connect(daemon.socket, host_bytes=0, reconnect_seconds=1, name="kept") as kept:
        handle = kept.put(torch.arange(1 << 17))
        kept.flush()
        with TierStore.connect(daemon.socket, host_bytes=0, reconnect_seconds=1, name="lost") as lost:
            lost_handle = lost.put(torch.ones(1 << 17))
            lost.flush()
            daemon.kill()
            index = Index(io.FileIO(daemon.path / FOLDER_NAME / "index", "r+"), map_bytes_for(2**30))
            index.apply([PutLease(2, b"damaged")])
            index.close()
            daemon = start_daemon(daemon.path, daemon.socket)
            assert sessions_of(daemon) == {"kept"}
            assert "a damaged session was dropped" in daemon.log
            with pytest.raises(DaemonUnavailableError, match="is lost"):
                lost.get(lost_handle)
        assert torch.equal(kept.get(handle), torch.arange(1 << 17))

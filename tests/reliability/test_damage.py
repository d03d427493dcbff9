"""Bytes flipped on disk under living daemons: an error that names what is lost, and never wrong values."""

import os
import random
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.census import Census
from tests.daemon.conftest import END_SECONDS, DaemonProcess, StartDaemon
from tests.daemon.training import gradients, make_model, nothing
from tests.reliability.conftest import end_well
from tests.reliability.supervised import SupervisedDaemon
from tests.waiting import until
from tierstore import (
    CorruptDataError,
    DaemonUnavailableError,
    StorageIOError,
    StoreFullError,
    TierStore,
)
from tierstore.disk.file_layout import FOLDER_NAME
from tierstore.residency.handle import Handle

LARGE, SMALL = 300_000, 600
"""Numbers of float32: an extent; a value in LMDB's file."""
LMDB_DEATHS = frozenset({6, 7, 11})
"""SIGABRT (its own assertions), SIGBUS, SIGSEGV: how damaged pages end the process that maps them."""
KILLED, SAID_DAMAGE = -9, 1
MOST_TRIES = 20
REFUSED, NOT_CONNECTED = "refused: the index is damaged", "not connected"


class Stored:
    """Records of a client's, and what they hold."""

    def __init__(self, store: TierStore, number: int, sizes: Iterable[int]) -> None:
        self.store = store
        self.contents = [
            torch.arange(size, dtype=torch.float32) + 300_100 * (place + 20 * number)
            for place, size in enumerate(sizes)
        ]
        self.handles: list[Handle] = [store.put(content.clone()) for content in self.contents]
        store.flush()

    def get(self, place: int) -> torch.Tensor:
        return self.store.get(self.handles[place])

    def check(self, places: Iterable[int]) -> None:
        for place in places:
            assert torch.equal(self.get(place), self.contents[place])


def flip_in_files(folder: Path, content: torch.Tensor) -> str:
    """Change a byte in the middle of a tensor, wherever it lies (LMDB leaves old copies of pages); the file's name."""
    needle, names = middle_of(content), set()
    for file in folder.iterdir():
        place, found = -1, file.read_bytes()
        with file.open("r+b", buffering=0) as opened:
            while (place := found.find(needle, place + 1)) >= 0:
                os.pwrite(opened.fileno(), bytes([needle[0] ^ 0x10]), place)
                names.add(file.name)
    (name,) = names
    return name


def middle_of(content: torch.Tensor) -> bytes:
    raw = content.numpy().tobytes()
    return raw[len(raw) // 2 :][:64]


def is_in_files(folder: Path, content: torch.Tensor) -> bool:
    """Whether a tensor lies there."""
    return any(middle_of(content) in file.read_bytes() for file in folder.iterdir())


@pytest.mark.parametrize("when", ["running", "killed"])
def test_payload_flipped_under_a_daemon_is_refused_and_others_are_right(start_daemon: StartDaemon, when: str) -> None:
    daemon = start_daemon(codec="none", disk_bytes="64MiB")
    with (
        TierStore.connect(daemon.socket, host_bytes=0, name="victim") as store,
        TierStore.connect(daemon.socket, host_bytes=0, name="neighbour") as other,
    ):
        stored, neighbours = Stored(store, 0, [LARGE] * 4 + [SMALL] * 4), Stored(other, 1, [LARGE, SMALL])
        hit = [0, 2, 5]
        if when == "killed":
            daemon.kill()
        names = [flip_in_files(daemon.path / FOLDER_NAME, stored.contents[place]) for place in hit]
        assert [name.partition("-")[0] for name in names] == ["segment", "segment", "index"]
        if when != "running":
            daemon = start_daemon(daemon.path, daemon.socket, codec="none", disk_bytes="64MiB")
        for place in hit:
            for _ in range(2):
                with pytest.raises(CorruptDataError) as caught:
                    stored.get(place)
                error = caught.value
                assert error.key == stored.handles[place].record.key
                assert ("segment" if place < 4 else "index") in error.place
                assert error.expected != error.found
                assert all(words in str(error) for words in (f"handle {error.key}:", error.place, error.expected))
        stored.check(set(range(8)) - set(hit))
        neighbours.check(range(2))
        assert_trains(store)
    end_well(daemon)


def test_saved_tensor_flipped_under_a_daemon_fails_that_backward_alone(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(codec="none", disk_bytes="64MiB")
    model, batch = make_model(0)
    with TierStore.connect(daemon.socket, host_bytes=0) as store:

        def flip() -> None:
            store.flush()
            flip_in_files(daemon.path / FOLDER_NAME, model[0](batch).detach())  # what the second block has saved

        with pytest.raises(CorruptDataError):
            gradients(model, batch, store, flip)
        assert_trains(store)


def assert_trains(store: TierStore) -> None:
    model, batch = make_model(1)
    expected = gradients(model, batch, None, nothing)
    found = gradients(model, batch, store, store.flush)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def flip_structure(folder: Path, steps: random.Random, share: float) -> int:
    """Change bytes in a share of the index's pages, where LMDB keeps what it follows; how many."""
    num_flips = 0
    with (folder / "index").open("r+b", buffering=0) as file:
        for page in range(0, os.fstat(file.fileno()).st_size, 4096):
            if steps.random() < share:
                for _ in range(8):
                    at = page + steps.randrange(256)
                    (old,) = os.pread(file.fileno(), 1, at) or b"\0"
                    os.pwrite(file.fileno(), bytes([old ^ 1 << steps.randrange(8)]), at)
                    num_flips += 1
    return num_flips


def check_daemon(start_daemon: StartDaemon, drive: Path, seed: int, when: str, census: Census) -> None:
    suite, steps = f"index flipped under a daemon that is {when}", random.Random(seed)
    drive.mkdir()
    with SupervisedDaemon(start_daemon, drive, codec="none", disk_bytes="64MiB") as daemon:
        census.count(suite, "daemons")
        with TierStore.connect(daemon.current.socket, host_bytes=0, reconnect_seconds=5) as store:
            stored = Stored(store, 0, [LARGE] * 3 + [SMALL] * 60)
            if when == "killed":
                os.kill(daemon.current.process.pid, 19)  # SIGSTOP: nothing is started before it is damaged
            census.count(suite, "bytes flipped", flip_structure(drive / FOLDER_NAME, steps, 0.1))
            if when == "killed":
                daemon.restart()
            for place in range(len(stored.handles)):
                census.count(suite, f"records {outcome_of_get(stored, place)}")
            census.count(suite, f"steps after it {outcome_of_step(store)}")
        daemon.restart()
        serve_a_new_client(daemon, suite, census)
        for code in daemon.codes:
            census.count(suite, f"daemons ended by signal {-code}" if code < 0 else f"daemons ended with {code}")
        assert all(-code in LMDB_DEATHS or code in (KILLED, SAID_DAMAGE) for code in daemon.codes), daemon.log()
        told = daemon.log().count(f"failed at the index under {drive}:")
        assert daemon.codes.count(SAID_DAMAGE) <= told, daemon.log()
        # The damage may just have ended the one before; the newest listens before it tells what it has found.
        until(lambda: re.search(r'found="?(\S+: )?(nothing|taken up|cleared)', daemon.current.log))


def serve_a_new_client(daemon: SupervisedDaemon, suite: str, census: Census) -> None:
    """Whatever the damage is, a daemon that is started again whenever it ends does not refuse for ever."""
    start = len(daemon.logs)
    for _ in range(MOST_TRIES):
        current = daemon.wait_for_start(start)
        outcome = outcome_of_new_client(current)
        census.count(suite, f"steps of a new client {outcome}")
        if outcome == "right":
            return
        if outcome in (REFUSED, NOT_CONNECTED):  # it is about to end, or has
            current.process.wait(END_SECONDS)
            start = daemon.logs.index(current) + 2
    raise AssertionError(daemon.log())


def outcome_of_get(stored: Stored, place: int) -> str:
    try:
        assert torch.equal(stored.get(place), stored.contents[place]), "wrong values"
    except CorruptDataError:
        return "refused as damaged"
    except (StorageIOError, DaemonUnavailableError) as error:  # the latter: the daemon is being started again
        return f"refused by {type(error).__name__}"
    return "right"


def outcome_of_step(store: TierStore) -> str:
    try:
        assert_trains(store)
    except (StorageIOError, DaemonUnavailableError, CorruptDataError, StoreFullError) as error:
        return f"ended by {type(error).__name__}"
    return "right"


def outcome_of_new_client(daemon: DaemonProcess) -> str:
    try:
        with TierStore.connect(daemon.socket, host_bytes=0, reconnect_seconds=5) as store:
            return outcome_of_step(store)
    except DaemonUnavailableError as error:  # LMDB refuses the lease, or has just ended the daemon
        return REFUSED if "no session can be opened" in str(error) else NOT_CONNECTED


@pytest.mark.parametrize("often", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.timeout(900)
@pytest.mark.parametrize("when", ["running", "killed"])
def test_index_flipped_under_a_daemon_gives_no_wrong_value(
    start_daemon: StartDaemon, tmp_path: Path, when: str, census: Census, often: bool
) -> None:
    for seed in range(10, 50) if often else range(1):
        check_daemon(start_daemon, tmp_path / f"{when}-{seed}", seed, when, census)

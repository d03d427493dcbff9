"""SIGKILL of the trainer and of the daemon, at each state of a handle and at any moment: nothing stays or stops."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.census import Census
from tests.daemon.clients import sessions_of
from tests.daemon.conftest import DaemonProcess, StartDaemon, environment_of_tests
from tests.daemon.training import gradients, make_model, nothing
from tests.reliability.conftest import end_well
from tests.reliability.drives import used_bytes
from tests.reliability.states import STATES, content, copies_for, held_at
from tests.reliability.supervised import SupervisedDaemon
from tierstore import StoreClosedError, TierStore
from tierstore.ledger.state import State

WAIT_SECONDS = 60.0
FEW_STATES = ["offloading", "writing", "writing, stored", "reading", "doomed"]
SOME_STATES = pytest.mark.parametrize(
    "states", [FEW_STATES, pytest.param(STATES, marks=pytest.mark.many)], ids=["a few", "all"]
)
MIB = 2**20


class Trainers:
    """A process that makes trainers, one after the other: an import of torch takes seconds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, kind: str, address: str | Path, what: str) -> int:
        """A trainer that has come so far; its pid."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, str(address), what]) + "\n")
        self._process.stdin.flush()
        pid, _, word = self._line().partition(" ")
        assert word == "reached", (pid, word)
        return int(pid)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self._line() == f"gone {-signal.SIGKILL}"

    def _line(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], WAIT_SECONDS)
        assert ready, "it says nothing"
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    command = [sys.executable, "-m", "tests.reliability.trainers"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = environment_of_tests(OMP_NUM_THREADS="1")
    with subprocess.Popen(command, text=True, bufsize=1, env=env, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield Trainers(process)
            process.stdin.close()
            assert process.wait(WAIT_SECONDS) == 0
        finally:
            process.kill()


def check_drive(drive: Path, empty_bytes: int) -> None:
    assert {path.name for path in drive.iterdir()} <= {"lost+found"}
    assert used_bytes(drive) == empty_bytes


def check_next_start(drive: Path) -> None:
    with TierStore(drive, host_bytes=0, disk_bytes="32MiB", codec="none") as store:
        handle = store.put(content())
        store.flush()
        assert torch.equal(store.get(handle), content())


@SOME_STATES
def test_trainer_killed_at_each_state_leaves_no_byte(small_drive: Path, trainers: Trainers, states: list[str]) -> None:
    empty_bytes = used_bytes(small_drive)
    for state in states:
        pid = trainers.start("embedded", small_drive, state)
        assert state == "closed" or used_bytes(small_drive) > empty_bytes
        trainers.kill(pid)
        check_drive(small_drive, empty_bytes)
        check_next_start(small_drive)
    check_drive(small_drive, empty_bytes)


class Neighbour:
    """Another client, whose bytes must not change."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.store = TierStore.connect(daemon.socket, host_bytes=0, name="neighbour")
        self._handle = self.store.put(content())
        self.store.flush()

    def check(self) -> None:
        """What it has stored is right, and more can be."""
        assert torch.equal(self.store.get(self._handle), content())
        handle = self.store.put(content() + 1)
        self.store.flush()
        assert torch.equal(self.store.get(handle), content() + 1)
        del handle
        self.store.flush()

    def train(self) -> None:
        model, batch = make_model(3)
        expected = gradients(model, batch, None, nothing)
        found = gradients(model, batch, self.store, nothing)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
        self.store.flush()


def wait_for_the_end_of_leases(daemon: DaemonProcess, own_bytes: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while (found := sessions_of(daemon)) != {"neighbour": own_bytes}:  # a lease ends by the daemon's own clock
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@contextmanager
def daemon_with_a_neighbour(start_daemon: StartDaemon) -> Iterator[tuple[DaemonProcess, Neighbour]]:
    daemon = start_daemon(codec="none", disk_bytes="64MiB", grace_seconds=0.05)
    neighbour = Neighbour(daemon)
    try:
        yield daemon, neighbour
        neighbour.train()
    finally:
        neighbour.store.close()
    end_well(daemon)
    assert list(daemon.path.iterdir()) == [], "nobody is left, nor is anything else"


@SOME_STATES
def test_client_killed_at_each_state_is_forgotten_after_the_grace_period(
    start_daemon: StartDaemon, trainers: Trainers, states: list[str]
) -> None:
    with daemon_with_a_neighbour(start_daemon) as (daemon, neighbour):
        own_bytes = sessions_of(daemon)["neighbour"]
        for state in states:
            pid = trainers.start("sidecar", daemon.socket, state)
            assert "victim" in sessions_of(daemon)
            trainers.kill(pid)
            wait_for_the_end_of_leases(daemon, own_bytes)
            neighbour.check()


@pytest.mark.parametrize(
    ("ended_by", "states"),
    [
        pytest.param(signal.SIGKILL, FEW_STATES, id="killed at a few"),
        pytest.param(signal.SIGKILL, STATES, id="killed at all", marks=pytest.mark.many),
        pytest.param(signal.SIGTERM, STATES, id="stopped at all", marks=pytest.mark.many),
    ],
)
def test_daemon_ended_at_each_state_of_a_handle_loses_nothing(
    start_daemon: StartDaemon, tmp_path: Path, ended_by: signal.Signals, states: list[str]
) -> None:
    path = tmp_path / "supervised"
    with SupervisedDaemon(start_daemon, path, codec="none", disk_bytes="64MiB", grace_seconds=3) as daemon:
        neighbour = Neighbour(daemon.current)
        for state in states:
            copies = copies_for(state)
            options = {"host_bytes": 2**30 if state == "offloading" else 0, "copies": copies, "name": "victim"}
            store = TierStore.connect(daemon.current.socket, **options)  # type: ignore[arg-type]
            with store, held_at(store, state) as held:
                daemon.restart(ended_by)
                held.go_on.set()
                if held.handle is not None:
                    check_held(store, held.handle, held.record.state)
                    held.handle = None
            if copies is not None:
                copies.end()
            neighbour.check()
        own_bytes = sessions_of(daemon.current)["neighbour"]
        wait_for_the_end_of_leases(daemon.current, own_bytes)  # of those that could not say that they close
        neighbour.store.close()
        assert "dropped" not in daemon.log()
        assert "a bug" not in daemon.log()
        assert sessions_of(daemon.current) == {}


def check_held(store: TierStore, handle: object, state: State) -> None:
    if state is State.CLOSED:
        with pytest.raises(StoreClosedError):
            store.get(handle)  # type: ignore[arg-type]
    else:
        assert torch.equal(store.get(handle), content())  # type: ignore[arg-type]


@pytest.mark.parametrize("num_kills", [3, pytest.param(100, marks=pytest.mark.many)])
@pytest.mark.timeout(600)
def test_daemon_killed_at_any_moment_loses_nothing(
    start_daemon: StartDaemon, tmp_path: Path, census: Census, num_kills: int
) -> None:
    steps, is_over = random.Random(num_kills), threading.Event()
    failures: list[BaseException] = []
    num_steps = 0

    def train(store: TierStore, seed: int) -> None:
        nonlocal num_steps
        model, batch = make_model(seed)
        expected = gradients(model, batch, None, nothing)
        try:
            while not is_over.is_set():
                found = gradients(model, batch, store, nothing)
                assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
                num_steps += 1
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)

    with SupervisedDaemon(start_daemon, tmp_path / "supervised", codec="none", disk_bytes="64MiB") as daemon:
        stores = [TierStore.connect(daemon.current.socket, host_bytes=0, name=f"client {seed}") for seed in range(2)]
        threads = [threading.Thread(target=train, args=(store, seed)) for seed, store in enumerate(stores)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(num_kills):
                is_over.wait(steps.uniform(0, 0.4))
                daemon.restart()
                census.count("daemon of two clients, killed at random", "kills")
        finally:
            is_over.set()
            for thread in threads:
                thread.join(WAIT_SECONDS)
        assert not failures, failures
        census.count("daemon of two clients, killed at random", "steps right", num_steps)
        for store in stores:
            store.flush()
            assert store.stats().disk_bytes == 0
            store.close()
        assert sessions_of(daemon.current) == {}
        assert "dropped" not in daemon.log()
        assert "a bug" not in daemon.log()

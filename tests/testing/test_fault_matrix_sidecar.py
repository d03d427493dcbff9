"""Every fault at every stage of a step through a real daemon: in its client, in its system calls, and its death."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.census import Census
from tests.daemon.conftest import DaemonProcess, environment_of_tests
from tests.testing.fault_matrix import (
    GONE,
    LOST,
    RIGHT,
    Case,
    cases_of_a_daemon,
    lost_daemon,
    usual_first,
)
from tests.testing.faulty_step import (
    FaultyStep,
    LocalFaults,
    SetsPlans,
    assert_nothing_is_held,
    assert_store_goes_on,
    close_quietly,
    count_of,
    run_case,
    training_of,
)
from tierstore.testing import FaultPlan, FaultyStore, Operation, SimulatedCopies

CASES = list(cases_of_a_daemon())
SMALL = {"host_bytes": 0, "window_bytes": "4MiB"}


class Daemon(DaemonProcess):
    """A daemon that takes plans of faults on its standard input. `SetsPlans`, for its system calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "drive").mkdir()
        super().__init__(self._start(), folder / "drive", folder / "d" / "t.sock", folder / "log")
        self.num_injected = 0
        self.wait_until_ready()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tierstore.testing.faulty_daemon", "-"]
        command += [f"--socket={self.folder / 'd' / 't.sock'}", f"--path={self.folder / 'drive'}"]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment_of_tests()
            )

    def set(self, plan: FaultPlan) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(plan.to_json().encode() + b"\n")
        self.process.stdin.flush()
        self.num_injected = sum(json.loads(self.process.stdout.readline()).values())

    def start_again(self) -> None:
        """It was killed: the next one, on the same files."""
        self.end()
        self.process = self._start()
        self.num_injected = 0
        self.wait_until_ready()

    def end(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:  # a socket's path has 107 bytes at most (unix(7))
        daemon = Daemon(Path(folder))
        yield daemon
        daemon.end()


@pytest.mark.parametrize("case", usual_first(CASES))
def test_fault_in_a_step_right_bits_or_the_promised_error(daemon: Daemon, census: Census, case: Case) -> None:
    # A torn write over the very same bytes, which an earlier case has left there, would be no damage.
    seed = 1 + CASES.index(case) if case.fault == "torn" else 0
    training = training_of(192 if case.is_of_system_calls else 64, seed)
    with SimulatedCopies() if case.stage in ("offload", "reload") else nullcontext() as copies:
        staging_bytes = training.staging_bytes(case.stage)
        store = FaultyStore.connect(daemon.socket, **SMALL, staging_bytes=staging_bytes, copies=copies)
        faults: SetsPlans = daemon if case.is_of_system_calls else LocalFaults(store.faults)
        came = run_case(training, store, faults, case)
    census.count(f"injected faults, sidecar, at {case.stage}", came)


@pytest.mark.parametrize("comes_back", [True, False], ids=["comes back", "stays away"])
@pytest.mark.parametrize(("stage", "operation", "occurrence"), LOST)
def test_daemon_lost_in_a_step_right_bits_or_told_in_time_and_used_again_when_it_is_back(
    daemon: Daemon, census: Census, stage: str, operation: Operation, occurrence: int, comes_back: bool
) -> None:
    training = training_of(64)
    staging_bytes = training.staging_bytes(stage)
    reconnect_seconds = 30 if comes_back else 0.2
    store = FaultyStore.connect(
        daemon.socket, **SMALL, staging_bytes=staging_bytes, reconnect_seconds=reconnect_seconds
    )
    lost = daemon.process

    def bring_back() -> None:
        lost.wait()
        daemon.start_again()

    watching = threading.Thread(target=bring_back)
    if comes_back:
        watching.start()
        promise = RIGHT
    else:
        must_raise = stage in ("pack", "spill", "restore")  # else it depends on what backward has read by then
        promise = GONE._replace(must_raise=must_raise)
    try:
        step = FaultyStep(training, store, LocalFaults(store.faults))
        step.run(stage, lost_daemon(operation, lost.pid, occurrence))
        assert step.struck == 1
        step.assert_is_as_promised(promise)
        census.count(f"lost daemon that {'comes back' if comes_back else 'stays away'}, at {stage}", count_of(step))
        step.forget()
        if not comes_back:
            watching.start()
        watching.join()
        if stage != "close":
            assert_store_goes_on(training, store, RIGHT)
    finally:
        lost.kill()
        if watching.ident is None:
            watching.start()
        watching.join()
        close_quietly(store)
    assert_nothing_is_held(store)

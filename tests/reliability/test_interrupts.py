"""Ctrl-C at random moments of training: no wrong gradient, no hang, nothing held; at worst the store is closed."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.census import Census
from tests.daemon.clients import sessions_of
from tests.daemon.conftest import StartDaemon, environment_of_tests
from tests.reliability.interrupted import Tally


def check(kind: str, address: Path, seed: int, num_interrupts: int, census: Census) -> None:
    command = [sys.executable, "-m", "tests.reliability.interrupted", kind, str(address), str(seed)]
    env = environment_of_tests(OMP_NUM_THREADS="1")
    done = subprocess.run([*command, str(num_interrupts)], capture_output=True, text=True, timeout=500, env=env)
    assert done.returncode == 0, done.stderr
    tally = msgspec.json.decode(done.stdout, type=Tally)
    suite = f"Ctrl-C at random moments of training, {kind}"
    census.count(suite, "in forward", tally.in_forward)
    census.count(suite, "in backward", tally.in_backward)
    census.count(suite, "elsewhere", tally.elsewhere)
    census.count(suite, "that closed the store", tally.closed)
    census.count(suite, "that left hooks on", tally.hooks_left)
    census.count(suite, "swallowed in a finalizer", done.stderr.count("Exception ignored"))
    assert tally.wrong == []
    assert tally.in_forward + tally.in_backward + tally.elsewhere > num_interrupts // 2


OFTEN = [pytest.param(seed, 250, marks=pytest.mark.slow) for seed in range(10, 14)]


@pytest.mark.usefixtures("unvalidated")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "num_interrupts"), [(1, 12), *OFTEN])
def test_interrupted_at_random_gradients_stay_right(
    directories: Path, census: Census, seed: int, num_interrupts: int
) -> None:
    check("embedded", directories, seed, num_interrupts, census)


@pytest.mark.usefixtures("unvalidated")
@pytest.mark.many
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(20, 22))
def test_interrupted_many_times_with_a_daemon_gradients_stay_right(
    start_daemon: StartDaemon, census: Census, seed: int
) -> None:
    daemon = start_daemon(codec="none", disk_bytes="256MiB", grace_seconds=0.1)
    check("sidecar", daemon.socket, seed, 200, census)
    assert sessions_of(daemon) == {}
    assert daemon.stop() == 0, daemon.log
    assert list(daemon.path.iterdir()) == []

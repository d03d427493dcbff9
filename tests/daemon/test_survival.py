"""Training through a daemon: the same gradients as alone, whoever is killed, and an error where that cannot be."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.daemon.clients import report_of, sessions_of
from tests.daemon.conftest import DaemonProcess, StartDaemon
from tests.daemon.training import DEPTH, gradients, make_model, nothing
from tests.waiting import until
from tierstore import DaemonUnavailableError, TierStore


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_daemon_that_comes_back_leaves_the_same_gradients(start_daemon: StartDaemon, how: str) -> None:
    """It goes in forward, between forward and backward, and in backward, of two steps."""
    daemons = [start_daemon()]
    model, batch = make_model(0)
    expected = gradients(model, batch, None, nothing)

    def restart() -> None:
        if how == "killed":
            daemons[-1].kill()
        else:
            assert daemons[-1].stop() == 0
        daemons.append(start_daemon(daemons[-1].path, daemons[-1].socket))

    hooks = [
        model[DEPTH // 2].register_forward_hook(lambda *_: restart()),
        model[DEPTH // 2].register_full_backward_hook(lambda *_: restart()),
    ]
    with TierStore.connect(daemons[0].socket, host_bytes=0, reconnect_seconds=30) as store:

        def between() -> None:
            restart()
            store.flush()  # else backward finds most of it in memory still

        for _ in range(2):
            found = gradients(model, batch, store, between)
            assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
        assert store.stats().restored_bytes > 0
        store.flush()
        assert store.stats().disk_bytes == 0
    for hook in hooks:
        hook.remove()
    assert len(daemons) == 1 + 2 * 3


TRAINER = """
import json, sys, torch
from tests.daemon.training import gradients, make_model, nothing
from tierstore import TierStore
seed = int(sys.argv[2])
model, batch = make_model(seed)
expected = gradients(model, batch, None, nothing)
with TierStore.connect(sys.argv[1], host_bytes=0, name=f"trainer {seed}") as store:
    for _ in range(4):
        found = gradients(model, batch, store, store.flush)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    print(json.dumps({"restored": store.stats().restored_bytes}))
    if sys.argv[3] == "hang":
        tensors = [torch.randn(1 << 18) for _ in range(8)]
        handles = [store.put(tensor) for tensor in tensors]
        store.flush()
        print("stored", flush=True)
        sys.stdin.read()
        assert all(torch.equal(store.get(handle), tensor) for handle, tensor in zip(handles, tensors, strict=True))
"""


def start_trainer(daemon: DaemonProcess, seed: int, then: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(daemon.socket), str(seed), then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("is_restarted", [False, True], ids=["the daemon stays", "the daemon is killed meanwhile"])
def test_client_stopped_for_longer_than_the_grace_period_goes_on_or_is_told(
    start_daemon: StartDaemon, is_restarted: bool
) -> None:
    """As in a debugger. While its connection is whole its session is kept; another's has ended meanwhile."""
    daemon = start_daemon(grace_seconds=0.5)
    stopped, killed = (start_trainer(daemon, seed, "hang") for seed in range(2))
    for trainer in (stopped, killed):
        assert trainer.stdout is not None
        trainer.stdout.readline()
        assert trainer.stdout.readline() == "stored\n"
    stopped.send_signal(signal.SIGSTOP)
    if is_restarted:
        daemon.kill()
        daemon = start_daemon(daemon.path, daemon.socket, grace_seconds=0.5)
    killed.kill()
    killed.communicate()
    left = set() if is_restarted else {"trainer 0"}
    until(lambda: sessions_of(daemon).keys() == left)  # leases end by the daemon's own clock
    stopped.send_signal(signal.SIGCONT)
    _, said = stopped.communicate(timeout=60)
    assert (stopped.returncode == 0) == (not is_restarted), said
    if is_restarted:
        assert "DaemonUnavailableError" in said
        assert "its lease has ended" in said
    assert sessions_of(daemon) == {}


def test_client_that_gave_up_and_asks_for_nothing_keeps_its_session(start_daemon: StartDaemon) -> None:
    """As in a long evaluation. The daemon is away for longer than it is waited for; then the lease would end."""
    options = {"grace_seconds": 8, "codec": "none"}
    daemon = start_daemon(**options)
    tensors = [torch.full((1 << 18,), float(number)) for number in range(2)]
    with TierStore.connect(daemon.socket, host_bytes=0, reconnect_seconds=0.3) as store:
        handles = [store.put(tensors[0].clone())]
        store.flush()
        daemon.kill()
        handles.append(store.put(tensors[1].clone()))
        with pytest.raises(DaemonUnavailableError):
            store.flush()
        daemon = start_daemon(daemon.path, daemon.socket, **options)
        until(lambda: report_of(daemon).sessions[0].is_connected)  # the lease would end by the daemon's own clock
        store.flush()
        assert all(torch.equal(store.get(handle), tensor) for handle, tensor in zip(handles, tensors, strict=True))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_keeps_nothing_of_its_parent_s(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(grace_seconds=0.2)
    program = r"""
import os, sys, time, torch
from tierstore import StoreClosedError, TierStore
store = TierStore.connect(sys.argv[1], host_bytes=0, name="parent")
handle = store.put(torch.ones(1 << 18))
store.flush()
child = os.fork()
if not child:
    try:
        store.get(handle)
    except StoreClosedError:
        os.write(1, b"refused\n")  # in one piece: both write to the same pipe
    sys.stdin.read()
    os._exit(0)
os.write(1, b"forked\n")
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(daemon.socket)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            assert {parent.stdout.readline(), parent.stdout.readline()} == {"forked\n", "refused\n"}
            assert sessions_of(daemon).keys() == {"parent"}
        finally:
            parent.kill()  # its child lives on, until the pipe to it is closed
        until(lambda: not sessions_of(daemon))


def test_close_while_writes_wait_for_a_daemon_that_stays_away_ends(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    options = {"host_bytes": 0, "window_bytes": "1MiB", "reconnect_seconds": 0.3}
    handles = []
    with TierStore.connect(daemon.socket, **options) as store:
        daemon.kill()
        with contextlib.suppress(DaemonUnavailableError):  # on a busy machine it is told so early
            handles.extend(store.put(torch.ones(3 << 16)) for _ in range(4))
    assert handles


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_close_does_not_wait_for_a_daemon_that_is_away_or_hangs(start_daemon: StartDaemon, how: signal.Signals) -> None:
    """As after Ctrl-C in a training that waits for it. Reads, and writes that wait for the window, are in progress."""
    daemon = start_daemon()
    options = {"host_bytes": 0, "window_bytes": "1MiB", "reconnect_seconds": 600}
    with TierStore.connect(daemon.socket, **options) as store:
        handles = [store.put(torch.ones(3 << 16)) for _ in range(4)]
        store.flush()
        daemon.process.send_signal(how)
        store.prefetch(handles[:2])
        handles.extend(store.put(torch.ones(3 << 16)) for _ in range(2))
        time.sleep(0.5)  # the jobs have begun
        closed_at = time.monotonic()
    assert time.monotonic() - closed_at < 30
    daemon.kill()

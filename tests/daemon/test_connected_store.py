"""What a store of a daemon has to cope with beside the daemon's death."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from tests.cgroups import entering, made_cgroup
from tests.daemon.conftest import StartDaemon
from tests.processes import output_of
from tierstore import QuotaExceededError, StoreFullError, TierStore, TierStoreWarning, tiered_offload
from tierstore.disk.forking import Inode, release_files
from tierstore.sidecar.window import SharedSlab
from tierstore.tracing.events import Restore, Spill
from tierstore.tracing.reader import read_trace
from tierstore.tracing.steps import steps_of
from tierstore.tracing.summary import summarize

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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_while_a_slab_is_made_leaves_nothing_of_it_to_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make a long one takes a second; a data loader that forks then would keep its memory for as long as it runs."""
    inodes: set[Inode] = set()
    statuses: list[int] = []

    def fork_and_allocate(descriptor: int, offset: int, num_bytes: int) -> None:
        if not (child := os.fork()):
            release_files(inodes)
            os._exit(os.readlink(f"/proc/self/fd/{descriptor}") != os.devnull)
        statuses.append(os.waitpid(child, 0)[1])
        os.truncate(descriptor, offset + num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", fork_and_allocate)
    slab = SharedSlab(1, MIB, inodes)
    assert statuses == [0]
    slab.close()
    assert not inodes


def test_trace_of_a_connected_store_agrees_with_stats(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon(codec="none")
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        with tiered_offload(store, min_bytes=0, trace=tmp_path / "step.jsonl"):
            loss = (torch.randn(256, 256, requires_grad=True) * 2).exp().tanh().sum()
        store.flush()
        loss.backward()
        stats = store.stats()
    trace = read_trace(tmp_path / "step.jsonl")
    settings = trace.header.store
    assert (settings.is_connected, settings.codec, settings.place) == (True, None, str(daemon.socket))
    spills = [event for event in trace.events if isinstance(event, Spill)]
    restores = [event for event in trace.events if isinstance(event, Restore)]
    assert sum(spill.nbytes for spill in spills) == stats.spilled_bytes > 0
    assert sum(restore.nbytes for restore in restores) == stats.restored_bytes > 0
    assert {job.drive_seconds for job in (*spills, *restores)} == {None}
    (step,) = steps_of(trace)
    assert summarize(step, trace.header).written.codec_seconds == 0


@pytest.mark.parametrize(
    "limit", [{"session_disk_bytes": "1MiB"}, {"max_records_per_user": 1}], ids=lambda each: next(iter(each))
)
def test_used_up_quota_is_told_with_the_option_that_raises_it(
    start_daemon: StartDaemon, limit: dict[str, object]
) -> None:
    daemon = start_daemon(codec="none", **limit)
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        handles = [store.put(torch.ones(MIB // 4)) for _ in range(2)]
        with pytest.raises(QuotaExceededError) as caught:
            store.flush()
        assert f"--{next(iter(limit)).replace('_', '-')}" in caught.value.advice
        handles.clear()
        store.flush()
        assert store.stats().disk_bytes == 0


TOO_LARGE_A_WINDOW = """
import resource, sys
import tierstore

resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 2**20, 64 * 2**20))  # of a slab too: without it the machine runs full
try:
    tierstore.TierStore.connect(sys.argv[1], host_bytes=0, window_bytes="64GiB")
except tierstore.ConfigError as error:
    print(error)
"""


def test_window_that_the_daemon_does_not_allow_takes_no_memory(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    assert "the daemon allows 17179869184 bytes of shared memory" in output_of(TOO_LARGE_A_WINDOW, daemon.socket)
    daemon.stop()
    assert "session ended: its client closed it" in daemon.log


MORE_THAN_THE_LIMIT_LEAVES = """
import sys
import torch
import tierstore

try:
    tierstore.TierStore.connect(sys.argv[1], host_bytes=0, window_bytes="1GiB")
except tierstore.StorageIOError as error:
    print(error)
with tierstore.TierStore.connect(sys.argv[1], host_bytes=0) as store:
    print(store.get(store.put(torch.ones(1000))).sum().item())
"""


def test_window_for_which_there_is_no_memory_is_refused_and_nobody_is_killed(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with made_cgroup("memory", memory__limit_in_bytes=1000 * MIB) as cgroup:
        said, total = output_of(MORE_THAN_THE_LIMIT_LEAVES, daemon.socket, before=entering(cgroup)).splitlines()
    assert "Cannot allocate memory: it takes 1.00 GiB at once, and " in said
    assert total == "1000.0"


@pytest.mark.parametrize(("window_bytes", "is_told"), [("48MiB", True), ("4MiB", False)])
def test_window_that_takes_what_a_training_gains_is_named(
    start_daemon: StartDaemon, window_bytes: str, is_told: bool
) -> None:
    value = torch.ones(2**18, requires_grad=True)
    options = {"host_bytes": 0, "staging_bytes": "1MiB", "window_bytes": window_bytes}
    daemon = start_daemon(codec="none")  # all 80 MiB are on disk, at whatever speed
    with TierStore.connect(daemon.socket, **options) as store, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", TierStoreWarning)
        with tiered_offload(store):
            result = value
            for _ in range(80):
                result = result.sin()
            store.flush()
        result.sum().backward()
    assert ["takes 48 MiB" in str(each.message) for each in told] == [True] * is_told
    assert all("window_bytes counts too" in str(each.message) for each in told)


def test_summary_names_the_window_that_takes_what_a_training_gains(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(codec="none")
    with TierStore.connect(daemon.socket, host_bytes=0, staging_bytes="1MiB") as store:
        handle = store.put(torch.ones(2**21))
        store.flush()
        assert "the staging window of 49 MiB" in store.stats().summary()
        assert "with a daemon `window_bytes`" in store.stats().summary()
        del handle

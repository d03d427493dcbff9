"""A short soak, through the command; and that its checks bite."""

import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from msgspec.structs import replace

from tests.conftest import MakeStore
from tests.daemon.conftest import StartDaemon, short_directory, start_daemon
from tests.inspect_store import inspect
from tests.reliability.drives import MIB, fill_up, mounted_drive
from tests.soak import trainer
from tests.soak.census import ALLOWANCE_BYTES, Census, census_of, differences
from tests.soak.episodes import EPISODES, Worker, WrongBytesError
from tests.soak.orders import Order
from tests.soak.payloads import is_payload, payload
from tests.soak.plan import DISTURBANCES, plan_of
from tierstore import DaemonUnavailableError, StoreFullError, TierStore

__all__ = ["short_directory", "start_daemon"]

ROOT = Path(__file__).parents[2]


def run_soak(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.soak", "--path", str(path), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_short_soak_ends_where_it_began(short_path: Path) -> None:
    """Two rounds: a quiet one, and one in which the daemon is killed."""
    run = run_soak("--rounds", "2", "--episodes", "14", "--trainers", "2", "--seed", "5", path=short_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed: 2 rounds" in run.stdout
    assert "rounds: daemon killed" in run.stdout
    assert list(short_path.iterdir()) == []


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A socket's path has 107 bytes at most (unix(7)): pytest's own are long."""
    with tempfile.TemporaryDirectory(prefix="ts-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_trainer_without_room_for_a_session_connects_again_on_a_small_drive_and_nowhere_else(
    tmp_path: Path, start_daemon: StartDaemon
) -> None:
    plan = plan_of(3, DISTURBANCES.index("small drive under the daemon"), 4, 1).trainers[0]
    counts: Counter[str] = Counter()
    with mounted_drive(tmp_path, 64 * MIB) as drive:
        daemon = start_daemon(drive, disk_bytes=2**30)
        daemon.wait_until_open()
        filler = fill_up(drive)
        with pytest.raises(DaemonUnavailableError, match="its drive has no room"):
            trainer._open(Order(replace(plan, allowed=()), [str(daemon.socket)]), counts)
        assert not counts

        def make_room() -> None:
            while not counts:
                time.sleep(0.01)
            filler.unlink()

        making_room = threading.Thread(target=make_room, daemon=True)
        making_room.start()
        trainer._open(Order(plan, [str(daemon.socket)]), counts).close()
        making_room.join()
        assert counts["no room for a session"] > 0
        assert daemon.stop() == 0, daemon.log


def test_plan_same_seed_and_number_is_the_same_round() -> None:
    plans = [plan_of(3, number, 40, 3) for number in range(len(DISTURBANCES))]
    assert plans == [plan_of(3, number, 40, 3) for number in range(len(DISTURBANCES))]
    assert tuple(plan.disturbance for plan in plans) == DISTURBANCES
    assert plans[0] != plan_of(4, 0, 40, 3)
    assert all(plan.trainers[0].allowed == () for plan in plans if plan.disturbance in ("nothing", "daemon killed"))


def make_worker(store: TierStore, allowed: tuple[str, ...] = ()) -> Worker:
    return Worker(store, 1, allowed, SimpleQueue())


def repeat(worker: Worker, name: str, times: int) -> None:
    for _ in range(times):
        worker.run(name)


def wrong(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    return changed


@pytest.mark.parametrize("name", EPISODES)
def test_episode_over_a_sound_store_passes(store: TierStore, name: str) -> None:
    torch.set_num_threads(1)
    worker = make_worker(store)
    for each in ("put", name, name):
        worker.run(each)
    worker.let_go()
    store.flush()
    assert store.stats().live_handles == 0


def test_payload_follows_from_its_key_alone() -> None:
    for key in range(60):
        assert is_payload(payload(key), key)
        assert not is_payload(payload(key), key + 1)


def test_read_with_one_wrong_bit_is_seen(store: TierStore, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(store)
    worker.run("put")
    get = store.get
    monkeypatch.setattr(store, "get", lambda handle: wrong(get(handle)))
    with pytest.raises(WrongBytesError, match="payload"):
        worker.run("get")
    worker.let_go()


@pytest.mark.parametrize("name", ["train", "retain", "nest", "differentiate twice"])
def test_gradient_with_one_wrong_bit_is_seen(store: TierStore, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As if an unpack had given other bytes: the copy that the books hand out is changed."""
    fetch = inspect(store).residency.fetch
    monkeypatch.setattr(inspect(store).residency, "fetch", lambda *given: wrong(fetch(*given)))
    worker = make_worker(store)
    with pytest.raises(WrongBytesError, match="differ"):
        repeat(worker, name, 10)
    worker.let_go()


def test_error_that_the_round_does_not_bring_about_is_raised(make_store: MakeStore) -> None:
    store = make_store(disk_bytes=4096, staging_bytes="64KiB")
    with pytest.raises(StoreFullError):
        repeat(make_worker(store), "train", 20)
    allowing = make_worker(store, ("StoreFullError",))
    repeat(allowing, "train", 20)
    assert allowing.counts["StoreFullError"] > 0


def test_census_names_what_is_more(tmp_path: Path) -> None:
    before = census_of()
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    with (tmp_path / "left open").open("w"):
        after = census_of()
    go.set()
    thread.join()
    found = differences(before, after)
    assert len(found) == 2
    assert "left open: 0 before, 1 after" in found[0]
    assert found[1].startswith("threads")
    assert differences(before, before) == []


def test_census_memory_beyond_the_allowance_is_named() -> None:
    before = Census(10**8, {}, {})
    assert differences(before, replace(before, memory_bytes=10**8 + ALLOWANCE_BYTES)) == []
    assert "memory" in differences(before, replace(before, memory_bytes=10**8 + ALLOWANCE_BYTES + 1))[0]


def test_census_counts_memory_that_is_touched() -> None:
    before = census_of()
    block = mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc may have some that was touched
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    assert census_of().memory_bytes - before.memory_bytes > 48 * 2**20

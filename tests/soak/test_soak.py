"""A short soak, through the command; and that its checks bite."""

import gc
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tests.soak.census import ALLOWANCE_BYTES, census_of, differences
from tests.soak.episodes import EPISODES, Worker, WrongBytesError
from tests.soak.plan import DISTURBANCES, plan_of
from tierstore import StoreFullError, TierStore

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_short_soak_ends_where_it_began() -> None:
    """Two rounds: a quiet one, and one in which the daemon is killed."""
    options = ["--rounds=2", "--episodes=14", "--trainers=2", "--seed=5"]
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    # A socket's path has 107 bytes at most (unix(7)): pytest's own are long.
    with tempfile.TemporaryDirectory(prefix="ts-", ignore_cleanup_errors=True) as folder:
        run = subprocess.run(
            [sys.executable, "-m", "tests.soak", "--path", folder, *options],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert os.listdir(folder) == []
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed: 2 rounds" in run.stdout
    assert "rounds: daemon killed" in run.stdout


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


def test_episodes_over_a_sound_store_pass(store: TierStore) -> None:
    worker = make_worker(store)
    for name in EPISODES:
        repeat(worker, name, 4)
    worker.release()
    gc.collect()
    store.flush()
    assert store.stats().live_handles == 0


@pytest.mark.parametrize(("name", "words"), [("get", "payload"), ("compute", "account")])
def test_one_wrong_bit_is_seen(store: TierStore, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    """As if an unpack had given other bytes: the copy that the books hand out is changed."""
    worker = make_worker(store)
    worker.run("put")
    fetch = inspect(store).residency.handing_out.fetch
    monkeypatch.setattr(
        inspect(store).residency.handing_out, "fetch", lambda *given, **named: wrong(fetch(*given, **named))
    )
    with pytest.raises(WrongBytesError, match=words):
        repeat(worker, name, 10)
    worker.release()


def test_error_that_the_round_does_not_bring_about_is_raised(make_store: MakeStore) -> None:
    store = make_store(disk_bytes=4096, staging_bytes="64KiB")
    with pytest.raises(StoreFullError):
        repeat(make_worker(store), "compute", 20)
    allowing = make_worker(store, ("StoreFullError",))
    repeat(allowing, "compute", 20)
    assert allowing.counts["StoreFullError"] > 0


def test_census_names_what_is_more(tmp_path: Path) -> None:
    before = census_of()
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    block = mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc may have some that was touched
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    with (tmp_path / "left open").open("w"):
        after = census_of()
    go.set()
    thread.join()
    descriptors, threads, memory = differences(before, after)
    assert "left open: 0 before, 1 after" in descriptors
    assert threads.startswith("threads")
    assert memory.startswith("memory")
    assert differences(before, before._replace(memory_bytes=before.memory_bytes + ALLOWANCE_BYTES)) == []
    assert differences(before, before._replace(threads=before.threads | {"ts-native": 4})) == []
    assert differences(before, before._replace(threads=before.threads | {"ts-native": 40})) != []

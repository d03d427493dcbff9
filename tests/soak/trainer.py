"""A training process: it does the rounds that it is told to do, and tells what it then holds."""

import faulthandler
import os
import signal
import threading
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import torch
import uvloop

from tests.soak.census import census_of, trim_memory
from tests.soak.episodes import EPISODES, Worker
from tests.soak.plan import Order, Said, TrainerPlan
from tierstore import DaemonUnavailableError, StorageIOError, TierStore, TierStoreError
from tierstore.demo.model import choose_vector_kernels
from tierstore.residency.handle import Handle

_MOST_FLUSHES = 100
_EMPTY = ("live_handles", "device_bytes", "host_bytes", "lent_bytes", "staging_used_bytes", "disk_bytes")
_NAMES = [*EPISODES, "compute", "compute"]
_NO_ROOM = ("No space left on device; nothing was stored", "its drive has no room")
_saying = threading.Lock()


def main(conductor: Connection, log: Path) -> None:
    """Takes an `Order` for each round, says `Said`. All threads' stacks go to the log on SIGUSR1."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    faulthandler.register(signal.SIGUSR1, file=2)
    torch.set_num_threads(1)
    choose_vector_kernels()  # several threads train, and may make first calls at once too
    torch.zeros((), requires_grad=True).backward()
    uvloop.new_event_loop().close()  # libuv keeps a pipe for signals from the first loop of a process on
    conductor.send(Said("ready", census_of()))
    try:
        while True:
            _round(conductor.recv(), conductor)
    except EOFError:
        pass


def _round(order: Order, conductor: Connection) -> None:
    counts: Counter[str] = Counter()
    failures: list[str] = []
    try:
        _work(order, counts, failures, conductor)
    except Exception as error:  # noqa: BLE001  (it is told, with the census)
        if isinstance(error, TierStoreError) and type(error).__name__ in order.plan.allowed:
            counts[type(error).__name__] += 1
        else:
            failures.append(traceback.format_exc())
    trim_memory()
    conductor.send(Said("round", census_of(), dict(counts), failures))


def _open(order: Order) -> TierStore | None:
    """None: on a small drive there may be no room for a store, or for a daemon's session, while others fill it."""
    plan = order.plan
    try:
        if plan.home == "embedded":
            return TierStore(order.places, **plan.options)
        return TierStore.connect(order.places[0], name="soak", **plan.options)
    except (StorageIOError, DaemonUnavailableError) as error:
        if "StoreFullError" in plan.allowed and any(words in str(error) for words in _NO_ROOM):
            return None
        raise


def _work(order: Order, counts: Counter[str], failures: list[str], conductor: Connection) -> None:
    """Open a store, have threads work over it, see that it is empty, and close it."""
    plan = order.plan
    store = _open(order)
    conductor.send(Said("opened"))
    if store is None:
        counts["no room to open"] += 1
        return
    shared: SimpleQueue[tuple[int, Handle]] = SimpleQueue()
    workers = [Worker(store, plan.seed + number, plan.allowed, shared) for number in range(plan.num_threads)]
    try:
        threads = [threading.Thread(target=_run, args=(each, plan, failures, conductor)) for each in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for worker in workers:
            worker.release()
            counts.update(worker.counts)
        if not failures:
            _check_empty(store, plan, failures)
            counts["spilled bytes"] += store.stats().spilled_bytes
            counts["restored bytes"] += store.stats().restored_bytes
    finally:
        store.close()


def _run(worker: Worker, plan: TrainerPlan, failures: list[str], conductor: Connection) -> None:
    for number in range(plan.num_episodes):
        name = worker.chance.choice(_NAMES)
        try:
            worker.run(name)
        except BaseException:  # noqa: BLE001  (it is told by the round)
            failures.append(f"episode {number}, {name}: {traceback.format_exc()}")
            return
        finally:
            with _saying:
                conductor.send(Said("episode"))


def _check_empty(store: TierStore, plan: TrainerPlan, failures: list[str]) -> None:
    trim_memory()
    for _ in range(_MOST_FLUSHES):
        try:
            store.flush()
            break
        except TierStoreError as error:  # one for each write that has failed since the last: others still run
            if type(error).__name__ not in plan.allowed:
                raise
    stats = store.stats().as_dict()
    held = {name: stats[name] for name in _EMPTY if stats[name]}
    if held and not (plan.allowed and set(held) <= {"disk_bytes"}):  # a full disk, or a lost daemon, frees it later
        failures.append(f"the store is not empty when nobody refers to anything: {held}")

"""A training process: `python -m tests.soak.trainer`. It does the rounds that it reads, and tells what it then holds.

A line of standard input is an `Order` in JSON; a line of standard output is a `Said`. On SIGUSR1 all threads' stacks go
to standard error.
"""

import asyncio
import faulthandler
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from queue import SimpleQueue

import msgspec
import torch
import uvloop

from tests.inspect_store import inspect
from tests.soak.census import census_of, trim_memory
from tests.soak.episodes import EPISODES, Worker
from tests.soak.orders import Order, Said
from tests.soak.plan import TrainerPlan
from tierstore import DaemonUnavailableError, StoreClosedError, TierStore, TierStoreError, tiered_offload
from tierstore.demo.model import choose_vector_kernels
from tierstore.residency.handle import Handle

_JOIN_SECONDS = 120.0
_ROOM_SECONDS = 60.0  # both together are less than the conductor waits
_MOST_FLUSHES = 100
_EMPTY = ("live_handles", "device_bytes", "host_bytes", "lent_bytes", "staging_used_bytes", "disk_bytes")


_output = threading.Lock()


def say(said: Said) -> None:
    with _output:
        sys.stdout.write(msgspec.json.encode(said).decode() + "\n")
        sys.stdout.flush()


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    choose_vector_kernels()  # several threads train, and may make first calls at once too
    torch.zeros((), requires_grad=True).backward()
    uvloop.new_event_loop().close()  # libuv keeps a pipe for signals from the first loop of a process on
    say(Said("ready", census_of()))
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        say(_round(order))


def _round(order: Order) -> Said:
    counts: Counter[str] = Counter()
    failures: list[str] = []
    try:
        _work(order, counts, failures)
    except TierStoreError as error:
        if type(error).__name__ in order.plan.allowed:
            counts[type(error).__name__] += 1
        else:
            failures.append(traceback.format_exc())
    except Exception:  # noqa: BLE001  (it is told, with the census)
        failures.append(traceback.format_exc())
    trim_memory()
    return Said("round", census_of(), dict(counts), failures)


def _open(order: Order, counts: Counter[str]) -> TierStore:
    """A store; on a small drive a daemon may have no room for a session while others fill it: then again."""
    plan = order.plan
    if plan.home == "embedded":
        return TierStore(order.places, **plan.options)
    ends = time.monotonic() + _ROOM_SECONDS
    while True:
        try:
            return TierStore.connect(order.places[0], name="soak", **plan.options)
        except DaemonUnavailableError as error:
            is_full = "StoreFullError" in plan.allowed and "its drive has no room" in str(error)
            if not is_full or time.monotonic() > ends:
                raise
        counts["no room for a session"] += 1
        time.sleep(0.05)


def _work(order: Order, counts: Counter[str], failures: list[str]) -> None:
    """Open a store, have threads work over it, see that it is empty, and close it, sometimes under a living graph."""
    plan = order.plan
    store = _open(order, counts)
    say(Said("opened"))
    shared: SimpleQueue[tuple[int, Handle]] = SimpleQueue()
    workers = [Worker(store, plan.seed + number, plan.allowed, shared) for number in range(plan.num_threads)]
    try:
        threads = [
            threading.Thread(target=_run, args=(worker, plan, failures), name=f"worker {number}", daemon=True)
            for number, worker in enumerate(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_JOIN_SECONDS)
            if thread.is_alive():
                _dump(store)
                raise RuntimeError(f"{thread.name} hangs: its stack is in the log")
        for worker in workers:
            worker.let_go()
            counts.update(worker.counts)
        if not failures:
            _check_empty(store, plan, failures)
            counts["spilled bytes"] += store.stats().spilled_bytes
            counts["restored bytes"] += store.stats().restored_bytes
    finally:
        graph = _living_graph(store) if plan.seed % 2 and not failures and not plan.allowed else None
        store.close()
    if graph is not None:
        _check_closed(graph, failures)


def _dump(store: TierStore) -> None:
    """All threads' stacks, and those of what waits on the engine's loop."""
    faulthandler.dump_traceback()
    for task in asyncio.all_tasks(inspect(store).loop):
        task.print_stack()


def _run(worker: Worker, plan: TrainerPlan, failures: list[str]) -> None:
    names = list(EPISODES)
    for number in range(plan.num_episodes):
        name = worker.chance.choice(names)
        try:
            worker.run(name)
        except BaseException:  # noqa: BLE001  (it is told by the round)
            failures.append(f"episode {number}, {name}: {traceback.format_exc()}")
            return
        finally:
            say(Said("episode"))


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


def _living_graph(store: TierStore) -> torch.Tensor:
    leaf = torch.ones(1 << 16, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        return (leaf * 2).exp().sin().sum()


def _check_closed(graph: torch.Tensor, failures: list[str]) -> None:
    try:
        graph.backward()
    except StoreClosedError:
        torch.zeros((), requires_grad=True).backward()  # else autograd's queue keeps the rest of the graph
        return
    failures.append("backward over a closed store raised nothing")


if __name__ == "__main__":
    main()

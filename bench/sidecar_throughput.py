"""What does it cost to keep the disk tier in a daemon: throughput, CPU time, and the time of a put?

The same tensors as in `disk_throughput`. An embedded store and a client of a daemon take turns with the raw device,
each in a process of its own. With two clients, two embedded stores in two processes compete for the drive beside them;
each moves half as much. With four it is a quarter. A client's memory and the window that it shares with the daemon are
together as large as the windows of an embedded store, 128 MiB.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from tierstore import TierStore

from .child import serve
from .disk_throughput import TENSOR_BYTES, mover_of, random_tensors
from .goals import Goal
from .harness import Benchmark
from .parties import Daemon, Figures, Party, daemon, lap_of, party, turns
from .raw_device import raw_device

RAW, EMBEDDED, SIDECAR = "raw", "embedded", "sidecar"
ONE, TWO, FOUR = "one client", "two clients", "four clients"
NUM_CLIENTS = {ONE: 1, TWO: 2, FOUR: 4}
NUM_TENSORS = 64  # of all clients together
GIGABYTES = NUM_TENSORS * TENSOR_BYTES / 1e9
TURNS = 5
PUT_TURNS = 30
PUTS = 512
PUT_BYTES = 2**20

BENCHMARK = Benchmark(
    name="sidecar_throughput",
    question="Spill, restore and put through a daemon, beside an embedded store and the raw device",
    variants=tuple(NUM_CLIENTS),
    plotted=("spill_to_embedded", "restore_to_embedded", "spill_to_raw", "restore_to_raw"),
    goals=(
        *(
            Goal(f"{way}, of embedded stores'", f"{way}_to_embedded", variant, at_least=bound)
            for variant, bound in ((ONE, 0.95), (TWO, 0.9), (FOUR, 0.95))
            for way in ("spill", "restore")
        ),
        Goal("put, of an embedded store's (5 % are noise)", "put_to_embedded", ONE, at_most=1.05),
    ),
)


def measure(variant: str, scratch: Path) -> Figures:
    """Medians over the turns after the first (its disk space and pages are fresh); of puts, the quickest turn."""
    num_clients = NUM_CLIENTS[variant]
    with ExitStack() as stack:
        served = stack.enter_context(daemon(scratch, "--codec", "none"))
        requests = {name: [[name, scratch, str(served.socket), num_clients]] for name in (RAW, EMBEDDED, SIDECAR)}
        parties = [stack.enter_context(party(name, __name__, each * num_clients)) for name, each in requests.items()]
        found: list[Figures] = []
        for _ in range(TURNS + 1):
            parties.reverse()
            found.append(one_turn(parties, served))
        puts = turns(parties, "put", PUT_TURNS) if variant == ONE else []
    figures = {name: statistics.median(turn[name] for turn in found[1:]) for name in found[0]}
    for way in ("spill", "restore"):
        ratios = [turn[f"{way}_to_embedded"] for turn in found[1:]]
        figures |= {f"{way}_to_embedded_least": min(ratios), f"{way}_to_embedded_most": max(ratios)}
    if puts:  # the least of many: whatever interrupts a put makes it longer
        for name in (EMBEDDED, SIDECAR):
            least = min(each["put_microseconds"] for turn in puts for each in turn[name])
            figures[f"{name}_put_microseconds"] = least
        figures["put_to_embedded"] = figures["sidecar_put_microseconds"] / figures["embedded_put_microseconds"]
    return figures


def one_turn(parties: list[Party], served: Daemon) -> Figures:
    figures: Figures = {}
    for way in ("spill", "restore"):
        rates = {}
        for each in parties:
            before = served.cpu_seconds
            laps = each.do(way)
            seconds = [lap["seconds"] for lap in laps]
            rates[each.name] = GIGABYTES / max(seconds)
            cpu_seconds = sum(lap["cpu_seconds"] for lap in laps) / GIGABYTES
            figures[f"{each.name}_{way}_gb_per_second"] = rates[each.name]
            figures[f"{each.name}_{way}_cpu_seconds_per_gb"] = cpu_seconds
            if each.name == SIDECAR:
                figures[f"daemon_{way}_cpu_seconds_per_gb"] = (served.cpu_seconds - before) / GIGABYTES
                figures[f"{way}_of_the_slower_client"] = min(seconds) / max(seconds)
        figures[f"{way}_to_embedded"] = rates[SIDECAR] / rates[EMBEDDED]
        figures[f"{way}_to_raw"] = rates[SIDECAR] / rates[RAW]
        figures[f"embedded_{way}_to_raw"] = rates[EMBEDDED] / rates[RAW]
    return figures


def work(name: str, scratch: Path, address: str, num_clients: int) -> None:
    num_tensors = NUM_TENSORS // num_clients
    with ExitStack() as stack:

        def open_store(host_bytes: int) -> TierStore:
            if name == SIDECAR:
                return stack.enter_context(TierStore.connect(address, host_bytes=host_bytes))
            return stack.enter_context(TierStore(scratch, host_bytes=host_bytes, codec="none"))

        commands: dict[str, Callable[[], Figures]] = {"put": dict}
        if name == RAW:
            mover = stack.enter_context(raw_device(scratch, num_tensors, TENSOR_BYTES))
        else:
            mover = mover_of(open_store(0), random_tensors(num_tensors))
            roomy = open_store(2 * PUTS * PUT_BYTES)
            commands["put"] = lambda: time_puts(roomy)
        commands |= {"spill": lambda: lap_of(mover.spill), "restore": lambda: lap_of(mover.restore)}
        serve(lambda command: commands[command]())


def time_puts(store: TierStore) -> Figures:
    tensors = [torch.empty(PUT_BYTES, dtype=torch.uint8) for _ in range(PUTS)]
    started = time.perf_counter()
    handles = [store.put(tensor) for tensor in tensors]
    seconds = time.perf_counter() - started
    handles.clear()
    store.flush()
    return {"put_microseconds": 1e6 * seconds / PUTS}

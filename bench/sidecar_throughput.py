"""What does it cost to keep the disk tier in a daemon: throughput, CPU time, and the time of a put?

The same 16 MiB tensors as in `disk_throughput`, incompressible, nothing kept in host memory. An embedded store and a
client of a daemon take turns with the raw device, each in a process of its own. With two clients, two embedded stores
in two processes compete for the drive beside them; each moves half as much. With four it is a quarter.

What a client moves is in its own memory and, a part of it, in the window that it shares with the daemon at once: both
together are as much memory as the windows of an embedded store, 128 MiB.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from .disk_throughput import TENSOR_BYTES, mover_of, raw_device
from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .parties import Daemon, Figures, Party, daemon, party, serve_commands, turns

RAW, EMBEDDED, SIDECAR = "raw", "embedded", "sidecar"
ONE, TWO, FOUR = "one client", "two clients", "four clients"
NUM_CLIENTS = {ONE: 1, TWO: 2, FOUR: 4}
NUM_TENSORS = 64
"""Of all clients together."""
GIGABYTES = NUM_TENSORS * TENSOR_BYTES / 1e9
TURNS = 5
PUT_TURNS = 30
PUTS = 512
PUT_BYTES = 2**20

BENCHMARK = Benchmark(
    name="sidecar_throughput",
    question="Spill, restore and put through a daemon, beside an embedded store and the raw device",
    variants=tuple(NUM_CLIENTS),
    compare="none",
    rounds=1,
    settings={
        "tensor_bytes": TENSOR_BYTES,
        "num_tensors": NUM_TENSORS,
        "turns": TURNS,
        "puts": PUTS,
        "put_bytes": PUT_BYTES,
    },
    plotted=("spill_to_embedded", "restore_to_embedded", "spill_to_raw", "restore_to_raw"),
    goals=(
        Goal("spill, of an embedded store's", "spill_to_embedded", ONE, at_least=0.9),
        Goal("restore, of an embedded store's", "restore_to_embedded", ONE, at_least=0.9),
        Goal("spill, of two embedded stores'", "spill_to_embedded", TWO, at_least=0.9),
        Goal("restore, of two embedded stores'", "restore_to_embedded", TWO, at_least=0.9),
        Goal("spill, of four embedded stores'", "spill_to_embedded", FOUR, at_least=0.95),
        Goal("restore, of four embedded stores'", "restore_to_embedded", FOUR, at_least=0.95),
        Goal("put, of an embedded store's (5 % are noise)", "put_to_embedded", ONE, at_most=1.05),
    ),
)


def measure(variant: str, scratch: Path) -> Figures:
    """Medians over the turns after the first (its disk space and pages are fresh); of puts, the quickest turn."""
    with ExitStack() as stack:
        served = stack.enter_context(daemon(scratch, "--codec", "none"))
        parties = [
            stack.enter_context(
                party(name, __spec__.name, [[name, str(scratch), str(served.socket), variant]] * NUM_CLIENTS[variant])
            )
            for name in (RAW, EMBEDDED, SIDECAR)
        ]
        found: list[Figures] = []
        for _ in range(TURNS + 1):
            parties.reverse()
            found.append(one_turn(parties, served))
        puts = turns(parties, "put", PUT_TURNS) if variant == ONE else []
    figures = {name: statistics.median(turn[name] for turn in found[1:]) for name in found[0]}
    for direction in ("spill", "restore"):
        ratios = [turn[f"{direction}_to_embedded"] for turn in found[1:]]
        figures |= {f"{direction}_to_embedded_least": min(ratios), f"{direction}_to_embedded_most": max(ratios)}
    return figures | (put_figures(puts) if puts else {})


def put_figures(puts: list[dict[str, list[Figures]]]) -> Figures:
    """The least of many: whatever interrupts a put makes it longer."""
    least = {
        name: min(each["put_microseconds"] for turn in puts for each in turn[name]) for name in (EMBEDDED, SIDECAR)
    }
    microseconds = {f"{name}_put_microseconds": value for name, value in least.items()}
    return microseconds | {"put_to_embedded": least[SIDECAR] / least[EMBEDDED]}


def one_turn(parties: list[Party], served: Daemon) -> Figures:
    """Each party spills everything, then each restores it all."""
    figures: Figures = {}
    for direction in ("spill", "restore"):
        rates = {}
        for each in parties:
            before = served.cpu_seconds
            laps = each.do(direction)
            rates[each.name] = GIGABYTES / max(lap["seconds"] for lap in laps)
            cpu_seconds = sum(lap["cpu_seconds"] for lap in laps) / GIGABYTES
            figures[f"{each.name}_{direction}_gb_per_second"] = rates[each.name]
            figures[f"{each.name}_{direction}_cpu_seconds_per_gb"] = cpu_seconds
            if each.name == SIDECAR:
                spent = (served.cpu_seconds - before) / GIGABYTES
                figures[f"daemon_{direction}_cpu_seconds_per_gb"] = spent
                seconds = [lap["seconds"] for lap in laps]
                figures[f"{direction}_of_the_slower_client"] = min(seconds) / max(seconds)
        figures[f"{direction}_to_embedded"] = rates[SIDECAR] / rates[EMBEDDED]
        figures[f"{direction}_to_raw"] = rates[SIDECAR] / rates[RAW]
        figures[f"embedded_{direction}_to_raw"] = rates[EMBEDDED] / rates[RAW]
    return figures


def work(name: str, scratch: Path, address: str, variant: str) -> None:
    """In a process of a party: spill, restore or put as told."""
    from tierstore import TierStore

    num_tensors = NUM_TENSORS // NUM_CLIENTS[variant]
    with ExitStack() as stack:
        roomy: TierStore | None = None
        if name == RAW:
            mover = stack.enter_context(raw_device(scratch, num_tensors))
        else:

            def open_store(host_bytes: int) -> TierStore:
                if name == SIDECAR:
                    return stack.enter_context(TierStore.connect(address, host_bytes=host_bytes))
                return stack.enter_context(TierStore(scratch, host_bytes=host_bytes, codec="none"))

            mover = mover_of(open_store(0), num_tensors)
            roomy = open_store(2 * PUTS * PUT_BYTES)
        commands: dict[str, Callable[[], Figures]] = {
            "spill": lambda: lap_of(mover.spill),
            "restore": lambda: lap_of(mover.restore),
            "put": lambda: time_puts(roomy),
        }
        serve_commands(lambda command: commands[command]())


def lap_of(move: Callable[[], None]) -> Figures:
    """Seconds of the clock, and those of all cores in this process."""
    started, cpu_started = time.perf_counter(), time.process_time()
    move()
    return {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}


def time_puts(store: object) -> Figures:
    """Mean microseconds of a put into a store with room; nothing for the raw device."""
    if store is None:
        return {}
    tensors = [torch.empty(PUT_BYTES, dtype=torch.uint8) for _ in range(PUTS)]
    started = time.perf_counter()
    handles = [store.put(tensor) for tensor in tensors]
    seconds = time.perf_counter() - started
    handles.clear()
    store.flush()
    return {"put_microseconds": 1e6 * seconds / PUTS}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        name, scratch, address, variant = json.loads(sys.argv[2])
        work(name, Path(scratch), address, variant)
    else:
        main_of_one_variant(measure)

"""Eight processes on one drive: does each get its share, and are they as fast together as one alone?

Every process moves as many 16 MiB tensors as the others, with a store of its own or through one daemon. All of them
begin at the same moment. Fair means: whoever is done first has not been served at the cost of whoever is done last. So
a share is a process's bytes per second until *it* is done, and the figure is the least share of the greatest: 1 if all
are done together, 1/8 if they were served one after the other.

They are as fast together as one, if all their bytes take no longer than the same number of bytes takes one process. One
takes turns with the eight, because a shared drive is twice as fast in one minute as in the next.

A machine with few cores has fewer than eight processes at work at a time. Whether the drive or the processor divides
the work, the figures do not tell.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

from .disk_throughput import TENSOR_BYTES, mover_of
from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .parties import Figures, Party, daemon, party, serve_commands
from .sidecar_throughput import lap_of

NUM_RANKS = 8
NUM_TENSORS = 128
"""Of all processes together."""
GIGABYTES = NUM_TENSORS * TENSOR_BYTES / 1e9
TURNS = 4
ONE, MANY = "one", "many"
EMBEDDED, SIDECAR = "embedded", "sidecar"
HOST_BYTES = 0
DIRECTIONS = ("spill", "restore")

BENCHMARK = Benchmark(
    name="many_ranks",
    question="Eight processes on one drive, beside one that moves as much",
    variants=(EMBEDDED, SIDECAR),
    compare="none",
    rounds=1,
    settings={
        "tensor_bytes": TENSOR_BYTES,
        "num_tensors": NUM_TENSORS,
        "num_ranks": NUM_RANKS,
        "turns": TURNS,
    },
    plotted=("spill_to_one", "restore_to_one", "spill_slowest_to_fastest", "restore_slowest_to_fastest"),
    timeout_seconds=600,
    goals=tuple(
        goal
        for variant in (EMBEDDED, SIDECAR)
        for direction in DIRECTIONS
        for goal in (
            Goal(f"{direction}, all together, of one", f"{direction}_to_one", variant, at_least=0.9),
            Goal(f"{direction}, the slowest, of the fastest", f"{direction}_slowest_to_fastest", variant, at_least=0.7),
        )
    ),
)


def measure(variant: str, scratch: Path) -> Figures:
    """Medians over the turns after the first, which takes space and pages for the first time."""
    with ExitStack() as stack:
        socket = ""
        if variant == SIDECAR:
            socket = str(stack.enter_context(daemon(scratch, "--codec", "none")).socket)
        parties = [
            stack.enter_context(party(name, __spec__.name, [[str(scratch), socket, NUM_TENSORS // number]] * number))
            for name, number in ((ONE, 1), (MANY, NUM_RANKS))
        ]
        turns = []
        for _ in range(TURNS + 1):
            parties.reverse()
            turns.append(one_turn(parties))
    return {name: statistics.median(turn[name] for turn in turns[1:]) for name in turns[0]}


def one_turn(parties: list[Party]) -> Figures:
    """Both parties spill everything, then restore it."""
    figures: Figures = {}
    for direction in DIRECTIONS:
        laps = {each.name: [lap["seconds"] for lap in each.do(direction)] for each in parties}
        for name, seconds in laps.items():
            figures[f"{name}_{direction}_gb_per_second"] = GIGABYTES / max(seconds)
        figures[f"{direction}_to_one"] = max(laps[ONE]) / max(laps[MANY])
        figures[f"{direction}_slowest_to_fastest"] = min(laps[MANY]) / max(laps[MANY])
    return figures


def work(scratch: Path, socket: str, num_tensors: int) -> None:
    """In a process of a party: spill or restore as told."""
    from tierstore import TierStore

    os.environ["LOCAL_WORLD_SIZE"] = str(NUM_TENSORS // num_tensors)  # default budgets are divided by it
    store = (
        TierStore.connect(socket, host_bytes=HOST_BYTES)
        if socket
        else TierStore(scratch, host_bytes=HOST_BYTES, codec="none")
    )
    with store:
        mover = mover_of(store, num_tensors)
        commands = {"spill": mover.spill, "restore": mover.restore}
        serve_commands(lambda command: lap_of(commands[command]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        scratch, socket, num_tensors = json.loads(sys.argv[2])
        work(Path(scratch), socket, num_tensors)
    else:
        main_of_one_variant(measure)

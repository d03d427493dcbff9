"""What does `io_depth` change on a drive that takes long to answer, and does the simulator know it?

One training whose saved tensors are eight times the host budget, on the drive as it is, and with every system call
begun 20 and 50 ms later, as where a network is in between. Each delay and depth has a store of its own. All take turns,
a step each, and whoever went first goes last the next time. Beside each stands the simulated step: of the machine as
the doctor found it, with that delay, at the pace of plain steps of the same turns. Nothing is fitted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from tierstore import TierStore, tiered_offload
from tierstore.base.defaults import NUM_BESIDE_DEVICE
from tierstore.simulator import Hardware, Settings, steady_seconds
from tierstore.simulator.from_hardware import hardware_of
from tierstore.testing import FaultPlan, FaultyStore, Latency, Rule
from tierstore.tuning.examine import examine
from tierstore.tuning.report import hardware_of as described

from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .simulator_accuracy import recorded
from .tuning_workloads import NUM_THREADS, SAVED_BYTES, Workload, make_workload

MIB = 2**20
WORKLOAD = "transformer"
HOST_BYTES = SAVED_BYTES[WORKLOAD] // 8
STAGING_BYTES = 64 * MIB
WARM_UP_STEPS = 2
TRACED_STEPS = 3
TURNS = 4
DOCTOR_SECONDS = 6.0


class Setting(NamedTuple):
    """A drive that answers so much later, and so many records at it at once."""

    delay_ms: int
    depth: int


SETTINGS = {
    f"{delay_ms} ms later, depth {depth}": Setting(delay_ms, depth)
    for delay_ms in (0, 20, 50)
    for depth in (1, 2, 4, 8, 16)
}
ALL = "all by turns"

BENCHMARK = Benchmark(
    name="io_depth",
    question="A step by how many records are at the drive at once, on drives that take longer to answer",
    variants=tuple(SETTINGS),
    processes={ALL: tuple(SETTINGS)},
    rounds=1,  # each figure is of several turns
    compare="none",
    settings={
        "workload": WORKLOAD,
        "host_bytes": HOST_BYTES,
        "staging_bytes": STAGING_BYTES,
        "num_threads": NUM_THREADS,
        "turns": TURNS,
    },
    goals=(
        Goal(
            "a step on a drive 50 ms away at depth 8, of one at depth 4",
            "step_seconds",
            "50 ms later, depth 8",
            at_most=0.95,
            of=("50 ms later, depth 4",),
        ),
        *(
            Goal(f"simulated step, {name}: error, percent", "error_percent", name, at_most=10)
            for name, setting in SETTINGS.items()
            if setting.depth == 4
        ),
    ),
    plotted=("step_seconds", "simulated_seconds"),
)

Around = Callable[[], AbstractContextManager[object]]


def measure(process: str, scratch: Path) -> dict[str, dict[str, float]]:
    """Of each setting the median step, the least and the most, and what the simulator says of it."""
    torch.set_num_threads(NUM_THREADS)
    workload = make_workload(WORKLOAD)
    trace = scratch / "plain.jsonl"
    with ExitStack() as stack:
        stores = {name: stack.enter_context(_open(scratch, setting)) for name, setting in SETTINGS.items()}
        taken: dict[str, list[float]] = {name: [] for name in stores}
        plain: list[float] = []
        order = list(stores)
        for _ in range(WARM_UP_STEPS + TURNS):
            plain.append(_timed_step(workload, nullcontext))
            for name in order:
                taken[name].append(_timed_step(workload, lambda name=name: tiered_offload(stores[name])))  # type: ignore[misc]
                stores[name].flush()
            order.reverse()
    with TierStore(scratch, host_bytes=4 * SAVED_BYTES[WORKLOAD]) as store:
        for _ in range(TRACED_STEPS):
            workload.step(lambda: tiered_offload(store, trace=trace))
    simulated = recorded(trace, plain[WARM_UP_STEPS:])
    machine = _machine(scratch)
    found = {}
    for name, setting in SETTINGS.items():
        steps = taken[name][WARM_UP_STEPS:]
        predicted = steady_seconds(simulated, _delayed(machine, setting), _simulated(setting))
        found[name] = {
            "step_seconds": statistics.median(steps),
            "least_step_seconds": min(steps),
            "most_step_seconds": max(steps),
            "simulated_seconds": predicted,
            "error_percent": 100 * abs(predicted / statistics.median(steps) - 1),
        }
    return found


def _open(scratch: Path, setting: Setting) -> FaultyStore:
    late = Rule(("pwritev", "preadv"), Latency(setting.delay_ms / 1e3))
    options = {"host_bytes": HOST_BYTES, "staging_bytes": STAGING_BYTES, "codec": "none", "io_depth": setting.depth}
    return FaultyStore(scratch, FaultPlan.of(late), **options)


def _timed_step(workload: Workload, around: Around) -> float:
    started = time.perf_counter()
    workload.step(around)
    return time.perf_counter() - started


def _machine(scratch: Path) -> Hardware:
    """As the doctor finds it. Raises RuntimeError: it could not measure the drive."""
    found = described(examine(scratch, str(scratch / "no daemon"), DOCTOR_SECONDS, lambda what: None))
    if found is None:
        raise RuntimeError("the doctor could not measure the drive")
    return hardware_of(found)


def _delayed(machine: Hardware, setting: Setting) -> Hardware:
    drive, seconds = machine.drive, setting.delay_ms / 1e3
    return replace(
        machine,
        drive=replace(
            drive,
            write_latency_seconds=drive.write_latency_seconds + seconds,
            read_latency_seconds=drive.read_latency_seconds + seconds,
        ),
    )


def _simulated(setting: Setting) -> Settings:
    num_lanes = setting.depth + NUM_BESIDE_DEVICE
    return Settings(
        HOST_BYTES,
        STAGING_BYTES,
        num_turns=setting.depth,
        num_spill_lanes=num_lanes,
        num_restore_lanes=num_lanes,
    )


if __name__ == "__main__":
    main_of_one_variant(measure)

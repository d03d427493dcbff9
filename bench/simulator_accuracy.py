"""How near does the simulator come to real steps, and does it know which settings are better?

Three models, by host budget, drive and prefetching. A simulated step gets what can be had without running it: the
recorded plain step, what `tierstore doctor` measures of the machine, and one figure that is fitted, the contention. It
is fitted to steps on the drive as it is, of two of the models; the third is held out of everything but the verdict.

A drive of so many MB/s is the real one, paced: it serves one transfer after the other. A round is a fresh process for
each model, in which all its settings take turns, a step each, with a store for each of them. Of each setting the median
over the rounds counts, and two settings whose rounds overlap are a tie.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from tierstore.base.defaults import NUM_SPILLS
from tierstore.hardware import hardware_text, read_hardware
from tierstore.simulator import Compute, DepthSpeed, Hardware, Observation, Settings, Workload, fit, steady_seconds
from tierstore.simulator.from_hardware import hardware_of
from tierstore.simulator.from_trace import workload_of
from tierstore.tracing.reader import read_trace
from tierstore.tracing.steps import steps_of
from tierstore.tuning.examine import examine
from tierstore.tuning.report import hardware_of as described

from .goals import Goal
from .harness import Benchmark, Figures, Record
from .tuning_workloads import NUM_THREADS, SAVED_BYTES, WORKLOADS, Contender, make_workload, open_store

MIB = 2**20
HELD_OUT = "branching"
WARM_UP_STEPS = 1
TURNS = 2
TRACED_STEPS = 3
DOCTOR_SECONDS = 6.0


class Setting(NamedTuple):
    """A host budget, as a share of what a step saves, a drive, and options of `tiered_offload`."""

    host_share: float
    drive_bytes_per_second: float | None = None
    options: Mapping[str, Any] = {}


_LOOKAHEAD = {"lookahead_bytes": 32 * MIB}
GRID = {
    "host 0": Setting(0),
    "host 1/4": Setting(1 / 4),
    "host 1/2": Setting(1 / 2),
    "host 1/4, no prefetch": Setting(1 / 4, None, {"prefetch": "none"}),
    "host 1/4, 300 MB/s": Setting(1 / 4, 300e6),
    "host 1/4, 300 MB/s, no prefetch": Setting(1 / 4, 300e6, {"prefetch": "none"}),
    "host 1/4, 300 MB/s, reverse": Setting(1 / 4, 300e6, {"prefetch": "reverse"}),
    "host 1/4, 300 MB/s, 32 MiB ahead": Setting(1 / 4, 300e6, _LOOKAHEAD),
    "host 0, 150 MB/s": Setting(0, 150e6),
    "host 1/4, 150 MB/s": Setting(1 / 4, 150e6),
    "host 1/4, 75 MB/s": Setting(1 / 4, 75e6),
}
PLAIN = "plain"
MACHINE = "machine"
PROCESSES = {name: [f"{name}: {setting}" for setting in (PLAIN, *GRID)] for name in WORKLOADS}
SIMULATOR, MEAN = "simulator", "always the mean"
CONCLUDED = [f"{who}, {what} models" for what in ("fitted", "held-out") for who in (SIMULATOR, MEAN)]

BENCHMARK = Benchmark(
    name="simulator_accuracy",
    question="Simulated steps beside real ones",
    variants=(*(variant for variants in PROCESSES.values() for variant in variants), MACHINE, *CONCLUDED),
    processes=PROCESSES,
    rounds=3,
    conclude=lambda records, folder: conclude(records, folder),
    concluded=CONCLUDED,
    goals=(
        Goal("slowest step beside the fastest", "span", f"{SIMULATOR}, fitted models", at_least=2),
        *(
            goal
            for what in ("fitted", "held-out")
            for goal in (
                Goal("median error, percent", "median_error_percent", f"{SIMULATOR}, {what} models", at_most=10),
                Goal("rank correlation", "rank_correlation", f"{SIMULATOR}, {what} models", at_least=0.9),
                Goal(
                    "median error beside that of the mean",
                    "median_error_percent",
                    f"{SIMULATOR}, {what} models",
                    at_most=1,
                    of=(f"{MEAN}, {what} models",),
                ),
            )
        ),
    ),
    plotted=("step_seconds", "simulated_seconds"),
)


# --- real steps -------------------------------------------------------------------------------------------------------


def measure(process: str, scratch: Path) -> dict[str, Figures] | Figures:
    """The median step of each setting of a model, by variant; or what the machine can do.

    Leaves the trace of plain steps, or the machine's description, in the folder of `scratch`.
    """
    if process == MACHINE:
        return measure_machine(scratch)
    torch.set_num_threads(NUM_THREADS)
    workload = make_workload(process)
    with ExitStack() as stack:
        contenders = {}
        for name, setting in ({PLAIN: Setting(4)} | GRID).items():
            host_bytes = int(setting.host_share * workload.saved_bytes)
            opened = open_store(scratch, setting.drive_bytes_per_second, host_bytes=host_bytes)
            store = stack.enter_context(opened)
            contenders[name] = Contender(workload, store, **setting.options)
            if name == PLAIN:
                traced = Contender(workload, store, trace=scratch.parent / f"{process}.jsonl")
        order = list(contenders.values())
        for _ in range(WARM_UP_STEPS + TURNS):
            for contender in order:
                contender.step()
            order.reverse()
        for _ in range(TRACED_STEPS):
            traced.step()
    return {
        f"{process}: {name}": {"step_seconds": each.median("step_seconds", WARM_UP_STEPS)}
        for name, each in contenders.items()
    }


def measure_machine(scratch: Path) -> Figures:
    found = described(examine(scratch, str(scratch / "no daemon"), DOCTOR_SECONDS, lambda what: None))
    if found is None:
        raise RuntimeError("the doctor could not measure the drive")
    (scratch.parent / f"{MACHINE}.toml").write_text(hardware_text(found))
    return {
        "write_gb_per_second": max(each.bytes_per_second for each in found.drive.writes) / 1e9,
        "read_gb_per_second": max(each.bytes_per_second for each in found.drive.reads) / 1e9,
        "copy_gb_per_second": found.host.copy_bytes_per_second / 1e9,
    }


# --- simulated steps, and the verdict ---------------------------------------------------------------------------------


def conclude(records: Sequence[Record], folder: Path) -> dict[str, Figures]:
    """The simulated step of each variant, and how near all of them come; nothing where a run has failed."""
    times: dict[str, list[float]] = {}
    for record in records:
        if record.figures is None:
            return {}
        if record.variant != MACHINE:
            times.setdefault(record.variant, []).append(record.figures["step_seconds"])
    machine = hardware_of(read_hardware(folder / f"{MACHINE}.toml"))
    workloads = {name: recorded(folder / f"{name}.jsonl", times[f"{name}: {PLAIN}"]) for name in WORKLOADS}
    fitted = fit(machine, list(observations(workloads, times)))
    pairs: dict[str, Predicted] = {}
    for name, workload in workloads.items():
        for what, setting in GRID.items():
            simulated = steady_seconds(workload, on_drive(fitted, setting), settings_of(name, setting))
            pairs[f"{name}: {what}"] = Predicted(simulated, times[f"{name}: {what}"])
    simulated_steps = {variant: {"simulated_seconds": pair.predicted} for variant, pair in pairs.items()}
    return simulated_steps | verdict(pairs, fitted.contention)


def recorded(trace: Path, plain_seconds: Sequence[float]) -> Workload:
    """The traced plain step that took the median time, at the pace of those without a trace."""
    read = read_trace(trace)
    steps = sorted(steps_of(read), key=lambda step: step.ended_ns - step.began_ns)
    workload = workload_of(read, steps[len(steps) // 2], training_cores=NUM_THREADS)
    pace = statistics.median(plain_seconds) / workload.compute_seconds
    actions = [Compute(pace * each.seconds) if isinstance(each, Compute) else each for each in workload.actions]
    return replace(workload, actions=actions)


def observations(workloads: Mapping[str, Workload], times: Mapping[str, Sequence[float]]) -> list[Observation]:
    """What is fitted to: the drive as it is, and no model that is held out."""
    return [
        Observation(workload, settings_of(name, setting), statistics.median(times[f"{name}: {what}"]))
        for name, workload in workloads.items()
        if name != HELD_OUT
        for what, setting in GRID.items()
        if setting.drive_bytes_per_second is None
    ]


def on_drive(machine: Hardware, setting: Setting) -> Hardware:
    if setting.drive_bytes_per_second is None:
        return machine
    speed = [DepthSpeed(1, setting.drive_bytes_per_second)]
    paced = replace(
        machine.drive, writes=speed, reads=speed, write_latency_seconds=0, read_latency_seconds=0, num_at_once=1
    )
    return replace(machine, drive=paced)


def settings_of(name: str, setting: Setting) -> Settings:
    """The same for the simulator. The pace is kept around the whole disk tier: every lane may wait for it."""
    settings = Settings(int(setting.host_share * SAVED_BYTES[name]), **setting.options)
    return settings if setting.drive_bytes_per_second is None else replace(settings, num_turns=NUM_SPILLS)


def verdict(pairs: Mapping[str, Predicted], contention: float) -> dict[str, Figures]:
    held_out = {variant: pair for variant, pair in pairs.items() if variant.startswith(f"{HELD_OUT}: ")}
    fitted = {variant: pair for variant, pair in pairs.items() if variant not in held_out}
    mean = statistics.fmean(pair.median for pair in fitted.values())
    found = {}
    for what, each in (("fitted", list(fitted.values())), ("held-out", list(held_out.values()))):
        found[f"{SIMULATOR}, {what} models"] = accuracy_of(each) | {"contention": contention}
        found[f"{MEAN}, {what} models"] = accuracy_of([pair._replace(predicted=mean) for pair in each])
    return found


def accuracy_of(pairs: Sequence[Predicted]) -> Figures:
    """Of the errors, the median and what nine in ten are below; the rank correlation and how many couples it is of."""
    errors = [pair.error_percent for pair in pairs]
    correlation, num_couples = rank_correlation(pairs)
    medians = [pair.median for pair in pairs]
    return {
        "median_error_percent": statistics.median(errors),
        "nine_in_ten_errors_below_percent": statistics.quantiles(errors, n=10)[-1],
        "rank_correlation": correlation,
        "couples_told_apart": num_couples,
        "span": max(medians) / min(medians),
    }


class Predicted(NamedTuple):
    """What one quantity was said to be, and what it was, each time; at least once."""

    predicted: float
    measured: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.measured)

    @property
    def error_percent(self) -> float:
        return 100 * abs(self.predicted / self.median - 1)


def is_tie(one: Predicted, other: Predicted) -> bool:
    """Whether the two differ by no more than the noise: the least and the most of their measurements overlap."""
    return min(one.measured) <= max(other.measured) and min(other.measured) <= max(one.measured)


def rank_correlation(pairs: Sequence[Predicted]) -> tuple[float, int]:
    """Kendall's, over those couples that are no tie, and how many these are.

    1: each of them is predicted the right way round; -1: none is. A couple that is predicted to be equal counts as
    half right. 0 where all are ties.
    """
    told_apart = [couple for couple in combinations(pairs, 2) if not is_tie(*couple)]
    signs = [numpy.sign((a.predicted - b.predicted) * (a.median - b.median)) for a, b in told_apart]
    return float(numpy.mean(signs)) if signs else 0.0, len(signs)

"""Predicts with the simulator how long a recorded step takes on other hardware, and how fast it wears drives. Pure.

The bound of a step is found by trying: it is simulated again with writes, reads, copies from and to the accelerator,
or the store's CPU work taking almost no time, or with unlimited host memory bandwidth. What helps most is the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, Literal

from ..base.config import parse_size
from ..base.defaults import NUM_AT_ONCE
from ..disk.codec.codec import parse_codec
from ..disk.endurance import DAY_SECONDS
from ..errors import ConfigError, StoreFullError
from ..simulator import DepthSpeed, Hardware, Link, Settings, SimulatedStep, Workload, simulate
from ..simulator.from_hardware import hardware_of
from ..tracing.reader import RecordedTrace
from ..tracing.steps import Step, steps_of
from .codecs import sample_data_of_kind
from .machines import Machine

__all__ = ["Limit", "Misfit", "Prediction", "answer", "last_whole_step", "planned_settings", "predict"]

Limit = Literal["nothing", "drive writes", "drive reads", "link", "memory", "CPU", "several"]
"""The bound of a step; "several": no single one of them."""

_AT_ONCE = 1e15  # bytes per second
_UNLIMITED_BYTES = 2**62
_WORTH_A_WORD = 1.02
"""Factor on the time of compute alone: nothing bounds a step up to that time."""
_LEAST_GAIN = 0.1  # share of the lost time: a bound explains at least this much
_YEAR_DAYS = 365.0


@dataclass(frozen=True)
class Prediction:
    """A step on one host, after earlier steps have taught the store the graph. Ranks begin together and do the same.

    Times are of the slowest rank, bytes of all ranks (peaks of each, added up), but `device_bytes_peak` of one.
    `compute_seconds`: of a step that moves nothing, with all ranks on these cores. `seconds_without`: by limit, the
    step's time if this alone took no time; empty if nothing bounds the step.
    """

    seconds: float
    compute_seconds: float
    stall_seconds: Mapping[str, float]
    link_wait_seconds: float
    written_bytes: int
    read_bytes: int
    offloaded_bytes: int
    reloaded_bytes: int
    host_bytes_peak: int
    staging_bytes_peak: int
    disk_bytes_peak: int
    device_bytes_peak: int
    limit: Limit
    seconds_without: Mapping[Limit, float]

    @property
    def slowdown(self) -> float:
        """`seconds` divided by `compute_seconds`; infinite if nothing is computed."""
        return self.seconds / self.compute_seconds if self.compute_seconds else inf


@dataclass(frozen=True)
class Misfit:
    """A tier is too small. `needed_bytes`: the most that a step holds there at once if there is room; of all ranks of a
    host, on an accelerator of one."""

    tier: Literal["accelerator", "host memory", "disk"]
    needed_bytes: int
    available_bytes: int


def predict(workload: Workload, machine: Machine, settings: Settings, *, num_ranks: int = 1) -> Prediction | Misfit:
    """Predict a step of `num_ranks` equal ranks on a machine that they share. Touches no file and waits for nothing.

    A simulation takes about a millisecond for each saved tensor and rank. Five or six are made.

    Raises:
        ConfigError: a number is below 1, or the machine's file has no figures of the codec, or of an accelerator.
    """
    _check(machine, workload, settings.codec)
    described = machine.hardware
    kinds = {saved.kind: sample_data_of_kind(saved.kind) for saved in workload.saved}
    hardware = hardware_of(described, kinds=kinds)
    share_bytes = hardware.drive.capacity_bytes // max(1, num_ranks)
    disk_bytes = share_bytes if settings.disk_bytes is None else min(settings.disk_bytes, share_bytes)

    def last_steps(hardware: Hardware, **changes: int) -> Sequence[SimulatedStep]:
        how = replace(settings, **({"disk_bytes": disk_bytes} | changes))  # type: ignore[arg-type]
        return [steps[-1] for steps in simulate(workload, hardware, how, num_ranks=num_ranks)]

    try:
        steps = last_steps(hardware)
    except StoreFullError:
        roomy = last_steps(hardware, disk_bytes=_UNLIMITED_BYTES)
        return Misfit("disk", sum(step.disk_bytes_peak for step in roomy), disk_bytes * num_ranks)

    def total(name: str) -> int:
        return sum(getattr(step, name) for step in steps)

    host_bytes = total("host_bytes_peak") + total("staging_bytes_peak")
    if host_bytes > described.host.capacity_bytes:
        return Misfit("host memory", host_bytes, described.host.capacity_bytes)
    device_bytes = max(step.device_bytes_peak for step in steps)
    known_bytes = described.accelerators[0].memory_bytes if described.accelerators else 0  # 0: not known
    if known_bytes and device_bytes > known_bytes:
        return Misfit("accelerator", device_bytes, known_bytes)
    everything = last_steps(hardware, host_bytes=_UNLIMITED_BYTES, device_bytes=_UNLIMITED_BYTES)
    slowest, compute_seconds = _slowest(steps), _slowest(everything).seconds
    seconds_without: dict[Limit, float] = {}
    if slowest.seconds > _WORTH_A_WORD * compute_seconds:
        for limit, better in _without(hardware).items():
            with suppress(StoreFullError):  # faster writes may need more room at once
                seconds_without[limit] = _slowest(last_steps(better)).seconds
    counters = [step.counters for step in steps]
    return Prediction(
        slowest.seconds,
        compute_seconds,
        slowest.stall_seconds,
        slowest.link_wait_seconds,
        written_bytes=sum(each.written_bytes for each in counters),
        read_bytes=sum(each.read_bytes for each in counters),
        offloaded_bytes=sum(each.offloaded_bytes for each in counters),
        reloaded_bytes=sum(each.reloaded_bytes for each in counters),
        host_bytes_peak=total("host_bytes_peak"),
        staging_bytes_peak=total("staging_bytes_peak"),
        disk_bytes_peak=total("disk_bytes_peak"),
        device_bytes_peak=device_bytes,
        limit=_limit(slowest.seconds, compute_seconds, seconds_without),
        seconds_without=seconds_without,
    )


def _limit(seconds: float, compute_seconds: float, seconds_without: Mapping[Limit, float]) -> Limit:
    """That without whose time the step would be fastest, if this explains a tenth of the lost time."""
    if seconds <= _WORTH_A_WORD * compute_seconds:
        return "nothing"
    least_seconds = seconds - _LEAST_GAIN * (seconds - compute_seconds)
    helping = [each for each, without in seconds_without.items() if without < least_seconds]
    return min(helping, key=seconds_without.__getitem__, default="several")


def _check(machine: Machine, workload: Workload, name: str) -> None:
    if workload.uses_device and not machine.hardware.accelerators:
        raise ConfigError("hardware", machine.name, "the step saves tensors on an accelerator, and its file has none")
    known = sorted({speed.codec for speed in machine.hardware.codecs})
    codec = parse_codec(name)
    if codec is not None and name != "none" and str(codec) not in known:
        figures = f"it has figures of {', '.join(known)}" if known else "it has figures of no codec"
        raise ConfigError("codec", name, f'hardware "{machine.name}" has no figures for it: {figures}')


def _slowest(steps: Sequence[SimulatedStep]) -> SimulatedStep:
    return max(steps, key=lambda step: step.seconds)


def _without(hardware: Hardware) -> dict[Limit, Hardware]:
    """For each limit, the machine without that limit."""
    drive, at_once = hardware.drive, [DepthSpeed(1, _AT_ONCE)]
    codecs = [
        replace(speed, encode_bytes_per_second=_AT_ONCE, decode_bytes_per_second=_AT_ONCE) for speed in hardware.codecs
    ]
    no_work = {"cpu_seconds_per_record": 0.0, "cpu_seconds_per_byte": 0.0, "call_seconds_per_record": 0.0}
    better: dict[Limit, Hardware] = {
        "drive writes": replace(hardware, drive=replace(drive, writes=at_once, write_latency_seconds=0.0)),
        "drive reads": replace(hardware, drive=replace(drive, reads=at_once, read_latency_seconds=0.0)),
        "CPU": replace(hardware, codecs=codecs, **no_work),  # type: ignore[arg-type]
    }
    if hardware.link is not None:
        better["link"] = replace(hardware, link=Link(_AT_ONCE, _AT_ONCE))
    if hardware.memory_bytes_per_second < inf:
        better["memory"] = replace(hardware, memory_bytes_per_second=inf)
    return better


def answer(workload: Workload, machine: Machine, settings: Settings, num_ranks: int) -> dict[str, Any]:
    """Plain values. Either `prediction` and `costs` or `misfit` are set; the others are None. Errors as `predict`'s.

    `costs` are those of a host that trains day and night: `years_to_rating`, until the drives have been written as much
    as they are rated for, is None if no rating is known or nothing is written.
    """
    outcome = predict(workload, machine, settings, num_ranks=num_ranks)
    named = {"machine": machine.name, "num_ranks": num_ranks}
    if isinstance(outcome, Misfit):
        return named | {"prediction": None, "misfit": asdict(outcome), "costs": None}
    drives = machine.hardware.drive.as_one()
    day_bytes = outcome.written_bytes * DAY_SECONDS / max(outcome.seconds, 1e-9)
    rated, year_bytes = drives.rated_written_bytes, _YEAR_DAYS * day_bytes
    costs = {
        "written_bytes_per_year": year_bytes,
        "drive_writes_per_day": day_bytes / drives.capacity_bytes if drives.capacity_bytes else None,
        "years_to_rating": rated / year_bytes if rated and year_bytes else None,
    }
    return named | {"prediction": asdict(outcome) | {"slowdown": outcome.slowdown}, "misfit": None, "costs": costs}


def last_whole_step(trace: RecordedTrace, source: str) -> Step:
    """The last step that was recorded from its forward to its end. `source`: the trace's file, for the message.

    Raises:
        ConfigError: there is no such step.
    """
    whole = [step for step in steps_of(trace) if step.is_whole and step.backward_began_ns is not None]
    if not whole:
        what = "it has no step that was recorded from its forward to the end of its backward"
        raise ConfigError("trace", source, what)
    return whole[-1]


def planned_settings(trace: RecordedTrace, step: Step, codec: str | None, **sizes: str | None) -> Settings:
    """The settings of each rank: those of the trace, unless given. Ranks share the drive. A daemon's codec is "auto".

    Raises:
        ConfigError: a value cannot be used.
    """
    recorded, scope = trace.header.store, step.scope
    lookahead_bytes = None if scope is None or scope.prefetch == "none" else scope.lookahead_bytes
    if lookahead_bytes == recorded.host_bytes + recorded.staging_bytes:
        lookahead_bytes = None  # it was automatic, and follows the budgets
    known = {
        "host_bytes": recorded.host_bytes,
        "staging_bytes": recorded.staging_bytes,
        "device_bytes": 0 if scope is None else scope.device_bytes,
    }
    said = {name: value for name, value in sizes.items() if value is not None}
    codec = codec or recorded.codec or "auto"
    parse_codec(codec)
    return Settings(
        **{name: parse_size(value, name) for name, value in (known | said).items()},
        codec=codec,
        prefetch="learned" if scope is None else scope.prefetch,
        lookahead_bytes=lookahead_bytes,
        num_spill_lanes=recorded.num_spill_lanes,
        num_restore_lanes=recorded.num_restore_lanes,
        num_turns=recorded.io_depth or NUM_AT_ONCE,
        staging_grows=recorded.staging_grows and "staging_bytes" not in said,
    )

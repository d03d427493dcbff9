"""Predicts with the simulator how long a step takes on a machine, or that it does not fit there. Pure.

The bound of a step is found by trying. The step is simulated again with writes, reads, copies from and to the
accelerator, or the store's CPU work taking almost no time, or with unlimited host memory bandwidth, one of them at a
time. The one that helps most is the bound.
The smallest drive that is enough is found by trying too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal

from ..disk.codec.codec import parse_codec
from ..errors import ConfigError, StoreFullError
from ..simulator import DepthSpeed, Hardware, Link, Settings, SimulatedStep, Workload, simulate
from ..simulator.from_hardware import hardware_of
from .contents import sample_data_of
from .machines import Machine

__all__ = ["Limit", "Misfit", "Prediction", "predict", "situation"]

Limit = Literal["nothing", "drive writes", "drive reads", "link", "memory", "CPU", "several"]
"""The bound of a step; "several": no single one of them."""

_AT_ONCE = 1e15  # bytes per second
_UNLIMITED_BYTES = 2**62
_WORTH_A_WORD = 1.02
"""Factor on the time of compute alone: nothing bounds a step up to that time."""
_LEAST_GAIN = 0.1  # share of the lost time: a bound explains at least this much
_NEAR = 0.05  # accuracy of the smallest drive that is enough, as a share of it
_BLOCK_BYTES = 4096


@dataclass(frozen=True)
class Prediction:
    """A step on one host, after earlier steps have taught the store the graph. Ranks begin together and do the same.

    Attributes:
        seconds: of the slowest rank.
        compute_seconds: of a step that moves nothing, with all ranks on these cores.
        stall_seconds: how long the slowest rank's threads waited, by cause, as in `StoreStats`.
        link_wait_seconds: how long its accelerator waited for copies, in addition.
        written_bytes, read_bytes: of all ranks.
        offloaded_bytes, reloaded_bytes: of all ranks, from accelerators to host memory and back.
        host_bytes_peak, staging_bytes_peak, disk_bytes_peak: the peak of each rank, added up.
        device_bytes_peak: the most that only the store holds on one rank's accelerator, at once.
        limit: what bounds the step.
        seconds_without: by limit, the step's time if this alone took no time. Empty if nothing bounds the step. A case
            for which the drive is too small is left out.
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
    """A tier is too small.

    Attributes:
        tier: the tier that is too small.
        needed_bytes: of all ranks of a host; on an accelerator, of one. For disk: the smallest size with which a step
            ends, within 5 %. (A refused write is tried again when there is room, and a pack may have to wait for it.)
            For host memory and accelerators: the most that the step holds there at once.
        available_bytes: size of the tier.
    """

    tier: Literal["accelerator", "host memory", "disk"]
    needed_bytes: int
    available_bytes: int


def predict(workload: Workload, machine: Machine, settings: Settings, *, num_ranks: int = 1) -> Prediction | Misfit:
    """Predict a step. Touches no file and waits for nothing.

    A simulation takes about a millisecond for each saved tensor and rank. Five or six are made if something bounds the
    step, and about eight if a drive is too small, to find the smallest that is enough.

    Args:
        workload: of each rank.
        machine: the machine that the ranks share.
        settings: of each rank; `disk_bytes` is at most an equal part of the drive.
        num_ranks: number of ranks on the machine.

    Raises:
        ConfigError: a number is below 1, or the machine's file has no figures of the codec, or of an accelerator.
    """
    hardware, settings = situation(workload, machine, settings, num_ranks)
    disk_bytes = settings.disk_bytes or 0
    try:
        steps = _last_steps(workload, hardware, settings, num_ranks)
    except StoreFullError:
        least_bytes = _least_disk_bytes(disk_bytes, workload, hardware, settings, num_ranks)
        return Misfit("disk", least_bytes * num_ranks, disk_bytes * num_ranks)
    needed_bytes = sum(step.host_bytes_peak + step.staging_bytes_peak for step in steps)
    if needed_bytes > machine.hardware.host.capacity_bytes:
        return Misfit("host memory", needed_bytes, machine.hardware.host.capacity_bytes)
    device_bytes, device_limit_bytes = _device_bytes_peak(steps), _device_memory_bytes(machine)
    if device_bytes > device_limit_bytes:
        return Misfit("accelerator", device_bytes, device_limit_bytes)
    compute_seconds = _compute_seconds(workload, hardware, settings, num_ranks)
    seconds_without: dict[Limit, float] = {}
    if _slowest(steps).seconds > _WORTH_A_WORD * compute_seconds:
        for limit, better in _without(hardware).items():
            with suppress(StoreFullError):  # faster writes may need more room at once
                seconds_without[limit] = _slowest(_last_steps(workload, better, settings, num_ranks)).seconds
    return _prediction(steps, compute_seconds, seconds_without)


def situation(workload: Workload, machine: Machine, settings: Settings, num_ranks: int) -> tuple[Hardware, Settings]:
    """The hardware and settings to simulate. Arguments and errors as those of `predict`."""
    _check_codec(machine, settings.codec)
    if workload.uses_device and not machine.hardware.accelerators:
        raise ConfigError("hardware", machine.name, "the step saves tensors on an accelerator, and its file has none")
    hardware = hardware_of(machine.hardware, kinds=sample_data_of(workload))
    share_bytes = hardware.drive.capacity_bytes // max(1, num_ranks)
    disk_bytes = share_bytes if settings.disk_bytes is None else min(settings.disk_bytes, share_bytes)
    return hardware, replace(settings, disk_bytes=disk_bytes)


def _prediction(
    steps: Sequence[SimulatedStep], compute_seconds: float, seconds_without: Mapping[Limit, float]
) -> Prediction:
    slowest = _slowest(steps)
    return Prediction(
        seconds=slowest.seconds,
        compute_seconds=compute_seconds,
        stall_seconds=slowest.stall_seconds,
        link_wait_seconds=slowest.link_wait_seconds,
        written_bytes=sum(step.counters.written_bytes for step in steps),
        read_bytes=sum(step.counters.read_bytes for step in steps),
        offloaded_bytes=sum(step.counters.offloaded_bytes for step in steps),
        reloaded_bytes=sum(step.counters.reloaded_bytes for step in steps),
        host_bytes_peak=sum(step.host_bytes_peak for step in steps),
        staging_bytes_peak=sum(step.staging_bytes_peak for step in steps),
        disk_bytes_peak=sum(step.disk_bytes_peak for step in steps),
        device_bytes_peak=_device_bytes_peak(steps),
        limit=_limit(slowest.seconds, compute_seconds, seconds_without),
        seconds_without=seconds_without,
    )


def _device_bytes_peak(steps: Sequence[SimulatedStep]) -> int:
    return max(step.device_bytes_peak for step in steps)


def _device_memory_bytes(machine: Machine) -> int:
    """Memory of one accelerator. 0 in the file means not known, and then it is unlimited."""
    accelerators = machine.hardware.accelerators
    return (accelerators[0].memory_bytes if accelerators else 0) or _UNLIMITED_BYTES


def _check_codec(machine: Machine, name: str) -> None:
    codec = parse_codec(name)
    if codec is None or name == "none":
        return
    known = sorted({speed.codec for speed in machine.hardware.codecs})
    if str(codec) not in known:
        figures = f"it has figures of {', '.join(known)}" if known else "it has figures of no codec"
        raise ConfigError("codec", name, f'hardware "{machine.name}" has no figures for it: {figures}')


def _last_steps(workload: Workload, hardware: Hardware, settings: Settings, num_ranks: int) -> Sequence[SimulatedStep]:
    """The last step of each rank, which all later steps would repeat."""
    return [steps[-1] for steps in simulate(workload, hardware, settings, num_ranks=num_ranks)]


def _least_disk_bytes(
    refused_bytes: int, workload: Workload, hardware: Hardware, settings: Settings, num_ranks: int
) -> int:
    """The smallest budget of each rank with which the steps end, within 5 %. `refused_bytes` is known to be too small.

    Found by bisection, in blocks, between `refused_bytes` and a budget that refuses no write.
    """

    def ends(num_blocks: int) -> bool:
        budget = replace(settings, disk_bytes=num_blocks * _BLOCK_BYTES)
        try:
            simulate(workload, hardware, budget, num_ranks=num_ranks)
        except StoreFullError:
            return False
        return True

    unlimited = simulate(workload, hardware, replace(settings, disk_bytes=_UNLIMITED_BYTES), num_ranks=num_ranks)
    peak_bytes = max(step.disk_bytes_peak for steps in unlimited for step in steps)
    refused = refused_bytes // _BLOCK_BYTES
    enough = max(refused + 1, ceil(peak_bytes / _BLOCK_BYTES))
    while not ends(enough):  # "auto" chooses other codecs when space is short, which may need more room
        refused, enough = enough, 2 * enough
    while enough - refused > max(1, _NEAR * enough):
        middle = (refused + enough) // 2
        if ends(middle):
            enough = middle
        else:
            refused = middle
    return enough * _BLOCK_BYTES


def _slowest(steps: Sequence[SimulatedStep]) -> SimulatedStep:
    return max(steps, key=lambda step: step.seconds)


def _compute_seconds(workload: Workload, hardware: Hardware, settings: Settings, num_ranks: int) -> float:
    """Time of a step whose budgets hold everything. Too many ranks for the cores slow it down even so."""
    roomy = replace(settings, host_bytes=_UNLIMITED_BYTES, device_bytes=_UNLIMITED_BYTES)
    return max(steps[-1].seconds for steps in simulate(workload, hardware, roomy, num_steps=1, num_ranks=num_ranks))


def _without(hardware: Hardware) -> dict[Limit, Hardware]:
    """For each limit, the machine without that limit."""
    drive, at_once = hardware.drive, [DepthSpeed(1, _AT_ONCE)]
    codecs = [
        replace(speed, encode_bytes_per_second=_AT_ONCE, decode_bytes_per_second=_AT_ONCE) for speed in hardware.codecs
    ]
    better: dict[Limit, Hardware] = {
        "drive writes": replace(hardware, drive=replace(drive, writes=at_once, write_latency_seconds=0.0)),
        "drive reads": replace(hardware, drive=replace(drive, reads=at_once, read_latency_seconds=0.0)),
        "CPU": replace(
            hardware, codecs=codecs, cpu_seconds_per_record=0.0, cpu_seconds_per_byte=0.0, call_seconds_per_record=0.0
        ),
    }
    if hardware.link is not None:
        better["link"] = replace(hardware, link=Link(_AT_ONCE, _AT_ONCE))
    if hardware.memory_bytes_per_second < inf:
        better["memory"] = replace(hardware, memory_bytes_per_second=inf)
    return better


def _limit(seconds: float, compute_seconds: float, seconds_without: Mapping[Limit, float]) -> Limit:
    if seconds <= _WORTH_A_WORD * compute_seconds:
        return "nothing"
    least_gain_seconds = _LEAST_GAIN * (seconds - compute_seconds)
    helping = {limit: better for limit, better in seconds_without.items() if seconds - better > least_gain_seconds}
    return min(helping, key=helping.__getitem__, default="several")

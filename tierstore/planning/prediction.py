"""What a step takes on a machine, by the simulator; or that it does not fit there. Pure.

What bounds a step is found by trying: it is simulated again with writes, reads, copies from and to the accelerator or
the store's CPU work that take next to no time, each alone. What helps most is the bound. The least drive that would do
is found by trying too.
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

Limit = Literal["nothing", "drive writes", "drive reads", "link", "CPU", "several"]
"""What bounds a step; "several": none of them does alone."""

_AT_ONCE = 1e15  # bytes per second
_UNLIMITED_BYTES = 2**62
_WORTH_A_WORD = 1.02
"""Times compute alone: what is not slower than that is bound by nothing."""
_LEAST_GAIN = 0.1  # of the time that is lost: a cause that explains less is none
_NEAR = 0.05  # of the least drive that would do: so much less is too little
_BLOCK_BYTES = 4096


@dataclass(frozen=True)
class Prediction:
    """A step of a host, once the graph is known. Ranks begin together and do the same.

    Attributes:
        seconds: of the slowest rank.
        compute_seconds: of a step that moves nothing, with all ranks on these cores.
        stall_seconds: for how long the slowest rank's threads waited, by cause, as `StoreStats` has them.
        link_wait_seconds: for how long its accelerator waited for copies, besides.
        written_bytes, read_bytes: of all ranks.
        offloaded_bytes, reloaded_bytes: likewise, from accelerators to host memory and back.
        host_bytes_peak, staging_bytes_peak, disk_bytes_peak: the most at once, of all ranks, added up.
        device_bytes_peak: the most at once on the accelerator of one rank, of what is the store's alone.
        limit: what bounds the step.
        seconds_without: what it would take if this alone took no time; empty where nothing bounds it. What the drive
            would be too small for then is left out.
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
        """Times compute alone; infinite where nothing is computed."""
        return self.seconds / self.compute_seconds if self.compute_seconds else inf


@dataclass(frozen=True)
class Misfit:
    """A tier is too small.

    Attributes:
        tier: which.
        needed_bytes: of all ranks of a host; on an accelerator, of one. Of disk the least with which a step ends, up to
            5 %: a write that it refuses is tried again when there is room, which a pack may have to wait for. Of host
            memory and accelerators, what these budgets take.
        available_bytes: that there are.
    """

    tier: Literal["accelerator", "host memory", "disk"]
    needed_bytes: int
    available_bytes: int


def predict(workload: Workload, machine: Machine, settings: Settings, *, num_ranks: int = 1) -> Prediction | Misfit:
    """What a step takes. Neither blocks nor touches a file.

    A simulation takes about a millisecond for each saved tensor and rank. There are five where something bounds the
    step, and some eight where a drive is too small: the least that would do is looked for.

    Args:
        workload: of each rank.
        machine: that they share.
        settings: of each rank; their `disk_bytes` are cut to an equal part of the drive.
        num_ranks: how many there are.

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
            with suppress(StoreFullError):  # what is written sooner may need more room at once
                seconds_without[limit] = _slowest(_last_steps(workload, better, settings, num_ranks)).seconds
    return _prediction(steps, compute_seconds, seconds_without)


def situation(workload: Workload, machine: Machine, settings: Settings, num_ranks: int) -> tuple[Hardware, Settings]:
    """What is simulated. Arguments and errors as those of `predict`."""
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
    """Of one accelerator; 0 in the file: not known."""
    accelerators = machine.hardware.accelerators
    return (accelerators[0].memory_bytes if accelerators else 0) or _UNLIMITED_BYTES


def _check_codec(machine: Machine, name: str) -> None:
    codec = parse_codec(name)
    if codec is None or name == "none":
        return
    known = sorted({speed.codec for speed in machine.hardware.codecs})
    if str(codec) not in known:
        figures = f"it has figures of {', '.join(known)}" if known else "it has figures of no codec"
        raise ConfigError("codec", name, f'hardware "{machine.name}" says nothing of it: {figures}')


def _last_steps(workload: Workload, hardware: Hardware, settings: Settings, num_ranks: int) -> Sequence[SimulatedStep]:
    """The last step of each rank, which is the one that goes on and on."""
    return [steps[-1] for steps in simulate(workload, hardware, settings, num_ranks=num_ranks)]


def _least_disk_bytes(
    refused_bytes: int, workload: Workload, hardware: Hardware, settings: Settings, num_ranks: int
) -> int:
    """A budget of each rank with which the steps end, while with hardly less they do not; nor with `refused_bytes`.

    Bisected, in blocks, between that and what refuses no write: each simulation halves what is in question.
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
    while not ends(enough):  # "auto" chooses otherwise where space is short, and then other records are there at once
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
    """Of a step whose budget holds everything: ranks that are too many for the cores are slow without any store."""
    roomy = replace(settings, host_bytes=_UNLIMITED_BYTES, device_bytes=_UNLIMITED_BYTES)
    return max(steps[-1].seconds for steps in simulate(workload, hardware, roomy, num_steps=1, num_ranks=num_ranks))


def _without(hardware: Hardware) -> dict[Limit, Hardware]:
    """The machine, better in one way each."""
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
    return better


def _limit(seconds: float, compute_seconds: float, seconds_without: Mapping[Limit, float]) -> Limit:
    if seconds <= _WORTH_A_WORD * compute_seconds:
        return "nothing"
    least_gain_seconds = _LEAST_GAIN * (seconds - compute_seconds)
    helping = {limit: better for limit, better in seconds_without.items() if seconds - better > least_gain_seconds}
    return min(helping, key=helping.__getitem__, default="several")

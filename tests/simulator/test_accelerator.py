"""Steps whose tensors are saved on an accelerator, in virtual time: the link, both ways, and the device window."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from tests.simulator.made_up import chain, drive, link
from tierstore.errors import ConfigError
from tierstore.hardware import AcceleratorLink
from tierstore.rules.device_window import FLIGHT_BYTES, RELOAD_BYTES
from tierstore.simulator import Hardware, Settings, SimulatedStep, Workload, simulate
from tierstore.simulator.clock import Clock, Process
from tierstore.simulator.device import Copy, SimulatedDevice
from tierstore.simulator.hardware import Activity

_TENSOR_BYTES = 64 * 2**20
_ROOMY = 2**40


def _chain(num: int = 40, gap_seconds: float = 0.01) -> Workload:
    return chain([_TENSOR_BYTES] * num, gap_seconds, on_device=True)


def _machine(of: AcceleratorLink | None, speed: float = inf) -> Hardware:
    return Hardware(drive(speed), 16, link=of)


def _last(workload: Workload, hardware: Hardware, how: Settings, num_ranks: int = 1) -> SimulatedStep:
    return simulate(workload, hardware, how, num_steps=4, num_ranks=num_ranks)[0][-1]


def test_step_on_a_link_that_takes_no_time_or_of_tensors_that_the_device_keeps_is_the_compute_time() -> None:
    everything, seconds = 40 * _TENSOR_BYTES, pytest.approx(_chain().compute_seconds)
    step = _last(_chain(), _machine(link(inf, inf)), Settings(host_bytes=_ROOMY))
    assert (step.seconds, step.counters.offloaded_bytes) == (seconds, everything)
    step = _last(_chain(), _machine(link(1.0, 1.0)), Settings(host_bytes=0, device_bytes=everything))
    assert (step.seconds, step.counters.offloaded_bytes, step.counters.reloaded_bytes) == (seconds, 0, 0)


@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0, 10.0])
def test_step_on_a_slow_link_takes_what_its_copies_take_but_for_what_may_be_on_its_way(factor: float) -> None:
    """A copy takes `factor` times as long as the layer that it could hide behind, in forward and in backward."""
    num, gap_seconds = 60, 0.01
    out, back = _TENSOR_BYTES / (factor * gap_seconds), _TENSOR_BYTES / (factor * 2 * gap_seconds)
    step = _last(_chain(num, gap_seconds), _machine(link(out, back)), Settings(host_bytes=_ROOMY))
    floor = num * gap_seconds * factor + num * 2 * gap_seconds * factor
    on_its_way = (FLIGHT_BYTES + 2 * _TENSOR_BYTES) / out + (RELOAD_BYTES + 2 * _TENSOR_BYTES) / back
    assert floor - on_its_way <= step.seconds <= floor + on_its_way


def test_ranks_have_a_link_each_and_share_the_drive() -> None:
    for machine, host_bytes, least, most in (
        (_machine(link(2e9, 2e9)), _ROOMY, 0.99, 1.01),
        (_machine(link(inf, inf), speed=2e9), 0, 3.0, 5.0),
    ):
        alone, beside = (_last(_chain(), machine, Settings(host_bytes), num_ranks) for num_ranks in (1, 4))
        assert least < beside.seconds / alone.seconds < most


def test_copies_of_a_direction_go_one_after_the_other_and_computing_waits_for_those_that_it_has_to() -> None:
    clock = Clock(lambda counts: _machine(link(10.0, 20.0)).rates(1.0, counts))
    device, elsewhere = SimulatedDevice(clock), SimulatedDevice(clock)
    out = [Copy(10), Copy(20)]
    back = [Copy(40), Copy(20, ready=out[1]), Copy(20)]
    others = Copy(30)
    ends: dict[Copy, float] = {}

    def watch(copy: Copy) -> Process:
        yield copy.wait
        ends[copy] = clock.now_seconds

    def compute() -> Process:
        for copy in out:
            device.wait(copy)
        yield from device.catch_up()
        assert clock.now_seconds == 3.0

    for copy in out:
        device.queue(Activity.OFFLOAD, copy)
    for copy in back:
        device.queue(Activity.RELOAD, copy)
    elsewhere.queue(Activity.OFFLOAD, others)
    for copy in (*out, *back, others):
        clock.begin(watch(copy))
    clock.begin(compute())
    clock.run()
    assert [ends[copy] for copy in (*out, *back, others)] == [1.0, 3.0, 2.0, 4.0, 5.0, 3.0]


def test_step_without_an_accelerator_is_refused() -> None:
    with pytest.raises(ConfigError, match="accelerator"):
        simulate(_chain(), _machine(None), Settings(host_bytes=_ROOMY))


def test_compute_on_an_accelerator_is_not_slowed_by_the_stores_threads() -> None:
    """One core, kept busy by checksums: on it, training would take longer."""
    busy, how = replace(_machine(link(inf, inf)), cores=1.0, cpu_seconds_per_byte=1e-11), Settings(8 * _TENSOR_BYTES)
    on_device = _last(_chain(), busy, how)
    on_cores = _last(chain([_TENSOR_BYTES] * 40, 0.01), busy, how)
    assert on_device.counters.written_bytes
    assert on_device.seconds == pytest.approx(_chain().compute_seconds, rel=0.02)
    assert on_cores.seconds > 1.02 * on_device.seconds

"""Steps whose tensors are saved on an accelerator, in virtual time: the link, both ways, and the device window."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator.made_up import chain, drive
from tierstore.errors import ConfigError
from tierstore.rules.device_window import FLIGHT_BYTES, RELOAD_BYTES
from tierstore.simulator import (
    Action,
    Compute,
    EndScope,
    Hardware,
    Link,
    Pack,
    Release,
    Saved,
    Settings,
    SimulatedStep,
    Unpack,
    Workload,
    simulate,
)
from tierstore.simulator.clock import Clock, Process
from tierstore.simulator.device import Copy, SimulatedDevice
from tierstore.simulator.hardware import Activity

_MIB, _GIB = 2**20, 2**30
_TENSOR_BYTES = 64 * _MIB
_ROOMY = 2**40


def _chain(num: int = 40, gap_seconds: float = 0.01) -> Workload:
    return chain([_TENSOR_BYTES] * num, gap_seconds, on_device=True)


def _machine(link: Link | None, speed: float = inf) -> Hardware:
    return Hardware(drive(speed), 16, contention=0.0, link=link)


def _last(workload: Workload, hardware: Hardware, how: Settings, num_ranks: int = 1) -> SimulatedStep:
    return simulate(workload, hardware, how, num_steps=4, num_ranks=num_ranks)[0][-1]


def test_step_on_a_link_that_takes_no_time_or_of_tensors_that_the_device_keeps_is_the_compute_time() -> None:
    everything, seconds = 40 * _TENSOR_BYTES, pytest.approx(_chain().compute_seconds)
    step = _last(_chain(), _machine(Link(inf, inf)), Settings(host_bytes=_ROOMY))
    assert (step.seconds, step.link_wait_seconds) == (seconds, pytest.approx(0))
    assert step.counters.offloaded_bytes == everything
    step = _last(_chain(), _machine(Link(1.0, 1.0)), Settings(host_bytes=0, device_bytes=everything))
    assert (step.counters.offloaded_bytes, step.counters.reloaded_bytes, step.link_wait_seconds) == (0, 0, 0)
    assert (step.seconds, step.device_bytes_peak) == (seconds, everything)


@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0, 10.0])
def test_step_on_a_slow_link_takes_what_its_copies_take_but_for_what_may_be_on_its_way(factor: float) -> None:
    """A copy takes `factor` times as long as the layer that it could hide behind, in forward and in backward."""
    num, gap_seconds = 60, 0.01
    out, back = _TENSOR_BYTES / (factor * gap_seconds), _TENSOR_BYTES / (factor * 2 * gap_seconds)
    workload = _chain(num, gap_seconds)
    step = _last(workload, _machine(Link(out, back)), Settings(host_bytes=_ROOMY))
    floor = num * gap_seconds * factor + num * 2 * gap_seconds * factor
    on_its_way = (FLIGHT_BYTES + 2 * _TENSOR_BYTES) / out + (RELOAD_BYTES + 2 * _TENSOR_BYTES) / back
    assert floor - on_its_way <= step.seconds <= floor + on_its_way
    waits = step.link_wait_seconds + sum(step.stall_seconds.values())
    assert step.seconds == pytest.approx(workload.compute_seconds + waits)


@pytest.mark.parametrize("num_staying", [0, 10])
def test_device_bytes_peak_is_what_stays_and_both_windows_where_backward_finds_copies_out_under_way(
    num_staying: int,
) -> None:
    how = Settings(host_bytes=_ROOMY, device_bytes=num_staying * _TENSOR_BYTES)
    step = _last(_chain(), _machine(Link(1e9, inf)), how)
    assert step.device_bytes_peak == how.device_bytes + FLIGHT_BYTES + RELOAD_BYTES


def test_device_bytes_peak_is_each_step_s_own() -> None:
    """The first does not know the graph yet: what will leave does so one tensor later."""
    how = Settings(host_bytes=_ROOMY, device_bytes=10 * _TENSOR_BYTES)
    first, second, *_ = simulate(_chain(), _machine(Link(inf, inf)), how)[0]
    assert second.device_bytes_peak == first.device_bytes_peak - _TENSOR_BYTES


def test_step_is_faster_the_more_the_device_keeps() -> None:
    link = _machine(Link(2e9, 2e9))
    steps = [
        _last(_chain(), link, Settings(host_bytes=_ROOMY, device_bytes=num * _TENSOR_BYTES)) for num in (0, 10, 20, 40)
    ]
    seconds = [step.seconds for step in steps]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.5 * seconds[-1]
    assert [step.counters.offloaded_bytes // _TENSOR_BYTES for step in steps] == [40, 30, 20, 0]


def test_step_on_a_slow_drive_behind_a_fast_link_waits_for_the_drive() -> None:
    step = _last(_chain(), _machine(Link(inf, inf), speed=1e9), Settings(host_bytes=4 * _TENSOR_BYTES))
    assert step.counters.read_bytes > 30 * _TENSOR_BYTES
    assert sum(step.stall_seconds.values()) > 10 * step.link_wait_seconds
    assert step.seconds > (step.counters.written_bytes + step.counters.read_bytes) / 1e9 * 0.9


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 50)), min_size=1, max_size=25),
    st.integers(0, 1500),
    st.integers(0, 1500),
    st.floats(1e8, 1e11),
)
def test_device_holds_no_more_than_its_windows_and_a_tensor_each_way(
    layers: list[tuple[int, int]], device_mebibytes: int, host_mebibytes: int, speed: float
) -> None:
    """One larger than the window passes alone; on the way back one may be in use while the next arrives."""
    actions: list[Action] = []
    for index, (_, milliseconds) in enumerate(layers):
        actions += [Compute(milliseconds / 1000), Pack(index)]
    actions.append(EndScope())
    actions += [act for index in reversed(range(len(layers))) for act in (Unpack(index), Release(index))]
    workload = Workload([Saved(size * _MIB, node, on_device=True) for node, (size, _) in enumerate(layers)], actions)
    how = Settings(host_mebibytes * _MIB, staging_bytes=512 * _MIB, device_bytes=device_mebibytes * _MIB)
    largest = max(size for size, _ in layers) * _MIB
    bound = how.device_bytes + max(FLIGHT_BYTES, largest) + max(RELOAD_BYTES, 2 * largest) + largest
    for step in simulate(workload, _machine(Link(speed, speed), speed=1e9), how)[0]:
        assert step.device_bytes_peak <= bound
        assert step.seconds >= workload.compute_seconds * (1 - 1e-9)


def test_ranks_have_a_link_each_and_share_the_drive() -> None:
    how = Settings(host_bytes=_ROOMY)
    alone, beside = (_last(_chain(), _machine(Link(2e9, 2e9)), how, num_ranks) for num_ranks in (1, 4))
    assert beside.seconds == pytest.approx(alone.seconds)
    alone, beside = (
        _last(_chain(), _machine(Link(inf, inf), speed=2e9), replace(how, host_bytes=0), num_ranks)
        for num_ranks in (1, 4)
    )
    assert beside.seconds > 3 * alone.seconds


def test_kernels_are_not_slowed_by_what_the_cores_do() -> None:
    crowded = replace(_machine(None), cores=2.0, contention=1.0).rates(
        1.0, {Activity.COMPUTE: 1, Activity.KERNELS: 1, Activity.CPU: 9}
    )
    assert (crowded[Activity.KERNELS], crowded[Activity.CPU]) == (1.0, 0.2)
    assert crowded[Activity.COMPUTE] < 0.2


def test_copies_of_a_direction_go_one_after_the_other_and_computing_waits_for_those_that_it_has_to() -> None:
    clock = Clock(lambda counts: _machine(Link(10.0, 20.0)).rates(1.0, counts))
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
    assert device.waited_seconds == 3.0


def test_write_of_what_was_on_an_accelerator_begins_when_its_copy_is_over() -> None:
    nbytes = 25_000 * 4096
    workload = Workload([Saved(nbytes, 0, on_device=True)], [Pack(0), EndScope(), Compute(10.0), Unpack(0), Release(0)])
    (step,) = simulate(workload, _machine(Link(nbytes / 2, inf), speed=float(nbytes)), Settings(0), num_steps=1)[0]
    spill, _ = step.transfers
    assert spill.ended_seconds == pytest.approx(2.0 + 1.0)


def test_step_without_an_accelerator_or_with_a_view_that_is_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="accelerator"):
        simulate(_chain(), _machine(None), Settings(host_bytes=_ROOMY))
    with pytest.raises(ConfigError, match="where its storage is"):
        Workload([Saved(8, 0), Saved(8, 1, record=0, on_device=True)], [Pack(0), Pack(1)])


def test_compute_on_an_accelerator_is_not_slowed_by_the_stores_threads() -> None:
    """One core, kept busy by checksums: on it, training would take longer."""
    busy = replace(_machine(Link(inf, inf)), cores=1.0, contention=4.0, cpu_seconds_per_byte=1e-11)
    on_device = _last(_chain(), busy, Settings(host_bytes=8 * _TENSOR_BYTES))
    in_memory = Workload([saved._replace(on_device=False) for saved in _chain().saved], _chain().actions)
    on_cores = _last(in_memory, busy, Settings(host_bytes=8 * _TENSOR_BYTES))
    assert on_device.counters.written_bytes
    assert on_device.seconds == pytest.approx(_chain().compute_seconds, rel=0.02)
    assert on_cores.seconds > 1.05 * on_device.seconds

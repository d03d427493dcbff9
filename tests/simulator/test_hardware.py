"""The description that `tierstore doctor` writes becomes hardware to simulate."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.simulator.made_up import link
from tierstore.hardware import CodecSpeed, DriveHardware, Hardware, HostHardware, Transfer
from tierstore.simulator.hardware import Activity, hardware_of


def _transfer(block_bytes: int, depth: int, speed: float) -> Transfer:
    return Transfer(block_bytes=block_bytes, depth=depth, bytes_per_second=speed, measured_bytes=1)


def _codec(data: str, ratio: float) -> CodecSpeed:
    return CodecSpeed(data=data, codec="zstd:1", ratio=ratio, encode_bytes_per_second=1e9, decode_bytes_per_second=2e9)


_FLOATS, _MASKS = _codec("floats", 0.8), _codec("masks", 0.1)
_DESCRIBED = Hardware(
    version=1,
    host=HostHardware(cores=3.5, capacity_bytes=1, copy_bytes_per_second=4e9, fresh_bytes_per_second=1e9),
    drive=DriveHardware(
        io_mode="O_DIRECT",
        capacity_bytes=123,
        write_latency_seconds=1e-4,
        read_latency_seconds=2e-4,
        writes=(_transfer(2**20, 4, 2e9), _transfer(2**24, 4, 3e9), _transfer(2**24, 1, 1e9)),
        reads=(_transfer(2**24, 1, 5e8),),
    ),
    codecs=(_FLOATS, _MASKS),
)


def test_hardware_of_a_description_has_its_figures_of_the_largest_blocks() -> None:
    hardware = hardware_of(_DESCRIBED)
    assert (hardware.cores, hardware.cpu_seconds_per_byte, hardware.link) == (3.5, 1 / 4e9, None)
    assert (hardware.drive.writes, hardware.drive.reads) == ({1: 1e9, 4: 3e9}, {1: 5e8})
    assert (hardware.drive.write_latency_seconds, hardware.drive.read_latency_seconds) == (1e-4, 2e-4)
    assert hardware.drive.capacity_bytes == 123
    assert hardware.codecs == {("", "zstd:1"): _FLOATS}
    named = hardware_of(_DESCRIBED, kinds={"float32": "floats", "uint8, many zeros": "masks"})
    assert named.codecs == {("float32", "zstd:1"): _FLOATS, ("uint8, many zeros", "zstd:1"): _MASKS}


def test_hardware_of_a_description_has_the_link_of_its_first_accelerator() -> None:
    links = (link(3e10, 2e10), link(1.0, 1.0))
    hardware = hardware_of(structs.replace(_DESCRIBED, accelerators=links))
    assert hardware.link == links[0]


def test_transfers_share_the_speed_at_their_depth_and_background_work_the_cores() -> None:
    hardware = hardware_of(_DESCRIBED)
    for depth, speed in ((1, 1e9), (2, (2e9 + 3e9) / 3), (4, 3e9), (9, 3e9)):
        assert hardware.rates(1.0, {Activity.WRITE: depth})[Activity.WRITE] * depth == pytest.approx(speed)
    crowded = hardware.rates(1.5, {Activity.COMPUTE: 1, Activity.KERNELS: 1, Activity.CPU: 2, Activity.WRITE: 1})
    assert crowded[Activity.COMPUTE] == crowded[Activity.CPU] == 1.0
    crowded = hardware.rates(1.5, {Activity.COMPUTE: 1, Activity.KERNELS: 1, Activity.CPU: 4})
    assert crowded[Activity.COMPUTE] == crowded[Activity.CPU] == 3.5 / 5.5
    assert crowded[Activity.KERNELS] == 1.0

"""The description that `tierstore doctor` writes becomes hardware to simulate."""

from __future__ import annotations

from msgspec import structs

from tierstore.hardware import AcceleratorLink, DriveHardware, HostHardware, Transfer
from tierstore.hardware import CodecSpeed as DescribedCodec
from tierstore.hardware import Hardware as DescribedHardware
from tierstore.simulator import CodecSpeed, DepthSpeed, Link
from tierstore.simulator.from_hardware import hardware_of


def _transfer(block_bytes: int, depth: int, speed: float) -> Transfer:
    return Transfer(block_bytes=block_bytes, depth=depth, bytes_per_second=speed, measured_bytes=1)


def _codec(data: str, ratio: float) -> DescribedCodec:
    return DescribedCodec(
        data=data, codec="zstd:1", ratio=ratio, encode_bytes_per_second=1e9, decode_bytes_per_second=2e9
    )


_DESCRIBED = DescribedHardware(
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
    codecs=(_codec("floats", 0.8), _codec("masks", 0.1)),
)


def test_hardware_of_description_has_its_figures() -> None:
    hardware = hardware_of(_DESCRIBED)
    assert (hardware.cores, hardware.contention, hardware.cpu_seconds_per_byte) == (3.5, 1.0, 1 / 4e9)
    assert hardware.drive.writes == [DepthSpeed(1, 1e9), DepthSpeed(4, 3e9)]
    assert hardware.drive.reads == [DepthSpeed(1, 5e8)]
    assert (hardware.drive.write_latency_seconds, hardware.drive.read_latency_seconds) == (1e-4, 2e-4)
    assert hardware.drive.capacity_bytes == 123
    assert hardware.link is None


def test_hardware_of_description_has_the_link_of_its_first_accelerator_and_all_drives() -> None:
    first = AcceleratorLink(
        name="x", memory_bytes=1, host_memory="pinned", to_host_bytes_per_second=3e10, to_device_bytes_per_second=2e10
    )
    second = structs.replace(first, to_host_bytes_per_second=1.0)
    both = structs.replace(_DESCRIBED.drive, num_drives=2)
    hardware = hardware_of(structs.replace(_DESCRIBED, accelerators=(first, second), drive=both))
    assert hardware.link == Link(3e10, 2e10)
    assert hardware.drive.writes == [DepthSpeed(1, 2e9), DepthSpeed(4, 6e9)]
    assert hardware.drive.reads == [DepthSpeed(1, 1e9)]
    assert hardware.drive.capacity_bytes == 246


def test_hardware_of_description_has_codecs_of_the_kinds_that_are_named() -> None:
    assert hardware_of(_DESCRIBED).codecs == [CodecSpeed("", "zstd:1", 0.8, 1e9, 2e9)]
    kinds = {"float32": "floats", "uint8, many zeros": "masks"}
    assert hardware_of(_DESCRIBED, kinds=kinds).codecs == [
        CodecSpeed("float32", "zstd:1", 0.8, 1e9, 2e9),
        CodecSpeed("uint8, many zeros", "zstd:1", 0.1, 1e9, 2e9),
    ]

"""The description of a machine: read back as written, and refused by file and key where it is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tierstore.errors import ConfigError
from tierstore.hardware import (
    AcceleratorLink,
    CodecSpeed,
    DriveHardware,
    Hardware,
    HostHardware,
    Transfer,
    hardware_text,
    read_hardware,
)

HARDWARE = Hardware(
    version=1,
    host=HostHardware(
        cores=3.5,
        capacity_bytes=2**34,
        copy_bytes_per_second=1.2e10,
        fresh_bytes_per_second=2e9,
    ),
    drive=DriveHardware(
        io_mode='buffered ("odd" file system)',
        capacity_bytes=2**40,
        write_latency_seconds=2e-5,
        read_latency_seconds=8e-5,
        writes=(
            Transfer(block_bytes=2**20, depth=1, bytes_per_second=1e9, measured_bytes=2**30),
            Transfer(block_bytes=2**24, depth=4, bytes_per_second=2e9, measured_bytes=2**31),
        ),
        reads=(Transfer(block_bytes=2**20, depth=1, bytes_per_second=1e9, measured_bytes=2**30),),
    ),
    codecs=(
        CodecSpeed(data="masks", codec="bits", ratio=0.125, encode_bytes_per_second=2e10, decode_bytes_per_second=1e10),
    ),
    accelerators=(
        AcceleratorLink(
            name="A card",
            memory_bytes=2**34,
            host_memory="pinned",
            to_host_bytes_per_second=2e10,
            to_device_bytes_per_second=2e10,
        ),
    ),
)
TEXT = hardware_text(HARDWARE)


def test_description_is_read_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "hw.toml"
    file.write_text(TEXT)
    assert read_hardware(file) == HARDWARE
    assert read_hardware(str(file)) == HARDWARE


Change = Callable[[str], str]


def replaced(old: str, new: str) -> Change:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (replaced("version = 1", "version = 2"), "version", "version 1"),
        (replaced("version = 1\n", ""), "version", "version 1"),
        (replaced("cores = 3.5", "cores = 0"), "host.cores", "> 0"),
        (replaced("cores = 3.5", "cores = nan"), "host.cores", "> 0"),
        (replaced("cores = 3.5", 'cores = "3"'), "host.cores", "got `str`"),
        (replaced("cores = 3.5\n", ""), "host", "missing required field `cores`"),
        (replaced("copy_bytes_per_second = 12000000000.0", "copy_bytes_per_second = inf"), None, "<= 1"),
        (replaced("cores = 3.5", "cores = 3.5\nthreads = 4"), "host.threads", "cores, capacity_bytes"),
        (replaced("depth = 4", "depth = 4.5"), "drive.writes[1].depth", "`int`"),
        (replaced("depth = 4", "depth = 4\nqueue = 1"), "drive.writes[1].queue", "block_bytes, depth"),
        (replaced("depth = 4", f"depth = {10**30}"), "drive.writes[1].depth", "4096"),
        (replaced("ratio = 0.125", "ratio = 8.0"), "codecs[0].ratio", "<= 2"),
        (replaced("[drive]\n", "[drives]\n"), None, ""),
        (replaced("[host]", "[[host]]"), "host", "got `array`"),
    ],
)
def test_description_that_is_wrong_names_file_and_key(
    change: Change, key: str | None, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "hw.toml"
    file.write_text(change(TEXT))
    with pytest.raises(ConfigError) as caught:
        read_hardware(file)
    if key is not None:
        assert caught.value.option == f"{file}: {key}"
    assert words in caught.value.allowed


def test_description_that_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        read_hardware(tmp_path / "hw.toml")
    assert caught.value.given == str(tmp_path / "hw.toml")

"""A process that is a trial; a machine that need not be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tierstore.hardware import CodecSpeed, DriveHardware, Hardware, HostHardware, Transfer, hardware_text
from tierstore.store.trial import VARIABLE, trial_of_process

MIB = 2**20
HARDWARE = Hardware(
    version=1,
    host=HostHardware(cores=2, capacity_bytes=2**34, copy_bytes_per_second=1e10, fresh_bytes_per_second=2e9),
    drive=DriveHardware(
        io_mode="O_DIRECT",
        capacity_bytes=2**34,
        write_latency_seconds=1e-5,
        read_latency_seconds=1e-5,
        writes=(Transfer(block_bytes=2**20, depth=4, bytes_per_second=2e10, measured_bytes=2**30),),
        reads=(Transfer(block_bytes=2**20, depth=4, bytes_per_second=2e10, measured_bytes=2**30),),
    ),
    codecs=(
        CodecSpeed(
            data="activations, float32",
            codec="zstd:1",
            ratio=0.9,
            encode_bytes_per_second=1e9,
            decode_bytes_per_second=1e9,
        ),
    ),
)


@pytest.fixture
def hardware_file(tmp_path: Path) -> Path:
    """As `tierstore doctor --hardware` writes it."""
    file = tmp_path / "hw.toml"
    file.write_text(hardware_text(HARDWARE))
    return file


@pytest.fixture
def begin_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Makes this process a trial, by a plan of these fields; returns the folder of its traces."""

    def begin(**plan: Any) -> Path:
        folder = tmp_path / "trial"
        folder.mkdir()
        file = folder / "plan"
        file.write_bytes(msgspec.json.encode({"folder": str(folder), "num_graphs": 2, **plan}))
        monkeypatch.setenv(VARIABLE, str(file))
        trial_of_process.cache_clear()
        return folder

    yield begin
    trial_of_process.cache_clear()

"""The figures of drives and accelerators, from real ones; and what is left of them when one fails."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore.base import device_files
from tierstore.tuning import drive as drive_module
from tierstore.tuning.drive import BLOCKS, DEPTHS, measure_drive
from tierstore.tuning.examine import measure_accelerators
from tierstore.tuning.measurements import Drive

MIB = 2**20
SECONDS = 0.3


def measured(directory: Path, seconds: float = SECONDS, memory_bytes: int = 2**30) -> Drive:
    drive = measure_drive(directory, seconds=seconds, memory_bytes=memory_bytes)
    assert list(directory.iterdir()) in ([], [directory / "lost+found"])
    return drive


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """An empty directory of a tmpfs."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no writable /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_drive_is_measured_at_each_depth_in_blocks_of_one_size(store_directory: Path) -> None:
    drive = measured(store_directory, seconds=1.0)
    assert [each.depth for each in drive.writes] == [each.depth for each in drive.reads] == list(DEPTHS)
    (block_bytes,) = {each.block_bytes for each in (*drive.writes, *drive.reads)}
    assert block_bytes in BLOCKS
    assert all(each.bytes_per_second > 0 for each in (*drive.writes, *drive.reads))
    assert drive.span_bytes % MIB == 0
    assert 0 < drive.span_bytes <= 512 * MIB
    assert (drive.write_latency_seconds or 0.0) > 0
    assert (drive.read_latency_seconds or 0.0) > 0
    assert drive.error is None


@pytest.mark.parametrize(("memory_bytes", "longest_bytes"), [(4 * MIB, MIB), (1_234_567, 128 * 2**10)])
def test_blocks_are_as_large_as_memory_allows(
    in_memory: Path, store_directory: Path, memory_bytes: int, longest_bytes: int
) -> None:
    for directory in (in_memory, store_directory):  # a drive refuses blocks of an odd length
        drive = measured(directory, seconds=1.0, memory_bytes=memory_bytes)
        assert drive.error is None
        assert drive.writes[0].block_bytes <= longest_bytes


def test_blocks_of_a_slow_drive_are_small(store_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(descriptor: int, buffers: Any, offset: int) -> None:
        time.sleep(0.2)

    monkeypatch.setattr(drive_module, "write_all", slow)
    drive = measured(store_directory, seconds=1.0)
    assert drive.writes[0].block_bytes == 128 * 2**10


def test_drive_that_fails_half_way_keeps_what_was_measured(
    store_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(descriptor: int, buffers: Any, offset: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(drive_module, "read_all", failing)
    drive = measured(store_directory)
    assert drive.error == "Input/output error"
    assert drive.span_bytes > 0
    assert drive.write_latency_seconds is not None
    assert (drive.read_latency_seconds, drive.writes) == (None, ())


@pytest.mark.parametrize(("driver", "words"), [("nothing-of-the-kind", "no driver"), ("null", "PyTorch")])
def test_reason_why_there_is_no_accelerator_is_said(driver: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if driver == "null" and torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    monkeypatch.setattr(device_files, "DEVICE_FILES", (driver,))
    state = measure_accelerators(1.0, MIB)
    assert (state.links, state.error) == ((), None)
    assert words in (state.note or "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator that PyTorch could use")
def test_each_accelerator_is_measured_with_pinned_memory() -> None:
    state = measure_accelerators(1.0, 64 * MIB)
    assert state.error is None
    assert len(state.links) == torch.accelerator.device_count()
    for link in state.links:
        assert link.host_memory == "pinned"
        assert link.memory_bytes > 2**30
        assert min(link.to_host_bytes_per_second, link.to_device_bytes_per_second) > 1e8

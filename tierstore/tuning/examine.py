"""Measures a machine, one thing after the other, in bounded time. `report.py` judges what it finds."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from ..base.config import available_host_bytes, local_world_size
from .accelerators import measure_accelerators
from .codecs import SAMPLES, measure_codecs
from .drive import NUM_STEPS, measure_drive
from .measurements import Measurements
from .memory import measure_huge_pages, measure_memory
from .system import describe_drive, describe_limits, describe_processor, find_daemon

__all__ = ["NUM_EXAMINED", "examine"]

NUM_EXAMINED = NUM_STEPS + len(SAMPLES) + 4
"""How often `examine` reports progress, at most."""

_DRIVE_SHARE, _CODEC_SHARE, _MEMORY_SHARE, _ACCELERATOR_SHARE = 0.7, 0.15, 0.05, 0.1
_BUFFER_SHARE = 8  # buffers take an eighth of the available memory


def examine(directory: Path, socket: str | None, seconds: float, progress: Callable[[str], None]) -> Measurements:
    """Measure the drive under `directory`, and the rest of the machine. Blocks.

    Args:
        directory: an existing, writable one. No file becomes visible in it, and none stays, however the process ends.
        socket: where a daemon is looked for; None: in the usual places.
        seconds: for all measurements together. It takes some seconds more, for imports, drivers, and transfers that a
            slow drive still has in flight: at most 15, not counting the start of a GPU's driver.
        progress: called with what was just examined, in words.

    Raises:
        ConfigError: LOCAL_WORLD_SIZE is no number.
    """
    began_at = time.monotonic()
    trainers = local_world_size() if "LOCAL_WORLD_SIZE" in os.environ else None
    memory_bytes = available_host_bytes() // _BUFFER_SHARE
    processor = describe_processor()
    daemon = find_daemon(socket, directory)
    progress("daemon")
    memory = measure_memory(_MEMORY_SHARE * seconds, int(processor.usable_cores))
    progress("memory")
    huge_pages = measure_huge_pages()
    progress("huge pages")
    drive = measure_drive(
        describe_drive(directory),
        directory,
        seconds=_DRIVE_SHARE * seconds,
        memory_bytes=memory_bytes,
        step_done=lambda: progress("drive"),
    )
    codecs = measure_codecs(_CODEC_SHARE * seconds, lambda: progress("codecs"))
    accelerators = measure_accelerators(_ACCELERATOR_SHARE * seconds, memory_bytes)
    progress("accelerators")
    return Measurements(
        kernel=platform.release(),
        num_trainers=trainers or max(1, len(accelerators.links)),
        seconds=time.monotonic() - began_at,
        drive=drive,
        memory=memory,
        huge_pages=huge_pages,
        processor=processor,
        limits=describe_limits(),
        codecs=codecs,
        accelerators=accelerators,
        daemon=daemon,
    )

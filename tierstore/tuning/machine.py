"""Measures the machine as far as a simulation needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..base.config import check_directory
from ..doctor.accelerators import measure_accelerators
from ..doctor.diagnosis import hardware_of
from ..doctor.examine import NUM_EXAMINED, examine
from ..hardware import AcceleratorLink, Hardware
from .program import TrialFailedError

__all__ = ["measure_links", "measure_machine"]

_SECONDS = 10.0
"""Enough for the speeds that a simulation needs."""
_LINK_SECONDS = 1.0
_LINK_BUFFER_BYTES = 64 * 2**20


def measure_machine(directory: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Hardware:
    """Measure the machine. Blocks for about ten seconds. `progress`: called with the steps done and their total.

    Raises:
        ConfigError: there is no such directory (any more).
        TrialFailedError: the drive could not be measured.
    """
    check_directory(directory)
    done = 0

    def examined(what: str) -> None:
        nonlocal done
        done += 1
        progress(done, NUM_EXAMINED)

    machine = examine(directory, None, _SECONDS, examined)
    described = hardware_of(machine)
    if described is None:
        raise TrialFailedError(f"the drive under {directory} could not be measured: {machine.drive.error}")
    return described


def measure_links() -> Sequence[AcceleratorLink]:
    """Measure only the links to this machine's accelerators. Blocks for a second; empty if there are none."""
    return measure_accelerators(_LINK_SECONDS, _LINK_BUFFER_BYTES).links

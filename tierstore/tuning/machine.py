"""The machine, as a simulation needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..config import DEFAULT_ADDRESS, check_directory
from ..doctor.diagnosis import hardware_of
from ..doctor.examine import NUM_EXAMINED, examine
from ..hardware import Hardware
from .program import TrialFailedError

__all__ = ["measure_machine"]

_SECONDS = 10.0
"""A simulation needs speeds; that is enough for them."""


def measure_machine(directory: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Hardware:
    """Measure it. Blocks for some ten seconds. `progress`: it has come so far, of so many.

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

    machine = examine(directory, DEFAULT_ADDRESS, _SECONDS, examined)
    described = hardware_of(machine)
    if described is None:
        raise TrialFailedError(f"the drive under {directory} could not be measured: {machine.drive.error}")
    return described

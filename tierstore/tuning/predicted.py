"""Predicts how long steps of a recorded workload take with other settings. The machine is fitted to the record."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from ..base.config import check_directory
from ..errors import ConfigError, StoreFullError
from ..hardware import AcceleratorLink, Hardware
from ..simulator import Hardware as SimulatedHardware
from ..simulator import Observation, Workload, fit, simulate, steady_seconds
from ..simulator.from_hardware import hardware_of
from .accelerators import measure_accelerators
from .codecs import sample_data_of_kind
from .examine import NUM_EXAMINED, examine
from .program import TrialFailedError
from .recording import ProgramRecording
from .report import hardware_of as description_of
from .settings import AUTO, TrialSettings
from .words import rate

__all__ = ["fitted", "link_in_words", "link_of", "machine_of", "measure_machine", "predict"]

_NUM_SIMULATED_STEPS = 3
_NUM_SIMULATED_FOR_FIT = 20
_MACHINE_SECONDS, _LINK_SECONDS = 10.0, 1.0
"""Enough for the speeds that a simulation needs."""
_LINK_BUFFER_BYTES = 64 * 2**20


def measure_machine(directory: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Hardware:
    """Measure the machine. Blocks for about ten seconds. `progress`: called with the steps done and their total.

    Raises:
        ConfigError: there is no such directory (any more).
        TrialFailedError: the drive could not be measured.
    """
    check_directory(directory)
    done: list[str] = []

    def examined(what: str) -> None:
        done.append(what)
        progress(len(done), NUM_EXAMINED)

    machine = examine(directory, None, _MACHINE_SECONDS, examined)
    described = description_of(machine)
    if described is None:
        raise TrialFailedError(f"the drive under {directory} could not be measured: {machine.drive.error}")
    return described


def link_of(described: Hardware, workload: Workload) -> AcceleratorLink | None:
    """The link to the accelerator, measured now if it was not described; None: the step saves nothing there.

    Raises:
        ConfigError: it could not be measured.
    """
    if not workload.uses_device:
        return None
    links = described.accelerators or measure_accelerators(_LINK_SECONDS, _LINK_BUFFER_BYTES).links
    if not links:
        what = "give a file with the link to the accelerator, which could not be measured"
        raise ConfigError("hardware", None, what)
    return links[0]


def link_in_words(link: AcceleratorLink) -> str:
    """Its speeds, for people."""
    out, back = rate(link.to_host_bytes_per_second), rate(link.to_device_bytes_per_second)
    return f"copies to the host at {out}, back at {back}"


def machine_of(
    described: Hardware, link: AcceleratorLink | None, workload: Workload, recording: ProgramRecording, seconds: float
) -> SimulatedHardware:
    """The machine to simulate. `seconds`: if fitting would take more than half of them, none is done."""
    kinds = {saved.kind: sample_data_of_kind(saved.kind) for saved in workload.saved}
    if link is not None:
        # The host runs ahead of its accelerator, which does not wait for calls of the store.
        described = structs.replace(described, accelerators=(link,))
        return replace(hardware_of(described, kinds=kinds), call_seconds_per_record=0.0)
    return fitted(hardware_of(described, kinds=kinds), workload, recording, seconds)


def fitted(
    hardware: SimulatedHardware, workload: Workload, recording: ProgramRecording, seconds: float
) -> SimulatedHardware:
    """The hardware with the contention that the recorded steps show, if half of the time is enough to find it.

    The recorded compute already contains what training lost to the store, so little contention is found. It makes the
    prediction for the recorded settings equal the measured time.
    """
    if recording.num_ranks > 1:  # the fit does not model ranks that slow each other down
        return hardware
    observed = Observation(workload, recording.settings.simulated, recording.step_seconds)
    began_at = time.monotonic()
    try:
        steady_seconds(observed.workload, hardware, observed.settings)
        is_quick = (time.monotonic() - began_at) * _NUM_SIMULATED_FOR_FIT <= seconds / 2
        return fit(hardware, [observed]) if is_quick else hardware
    except StoreFullError:  # the described machine may be another, with a smaller drive
        return hardware


def predict(workload: Workload, hardware: SimulatedHardware, num_ranks: int, settings: TrialSettings) -> float | None:
    """The seconds of the last of several simulated steps; None: it would fail, or "auto" has yet to find a size."""
    if settings.device_bytes == AUTO and workload.uses_device:
        return None
    how = settings.simulated
    try:
        ranks = simulate(workload, hardware, how, num_steps=_NUM_SIMULATED_STEPS, num_ranks=num_ranks)
    except StoreFullError:
        return None
    return ranks[0][-1].seconds

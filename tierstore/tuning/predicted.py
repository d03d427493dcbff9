"""Predicts how long steps of a recorded workload take with other settings. The machine is fitted to the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..errors import ConfigError, StoreFullError
from ..hardware import Hardware
from ..simulator import Hardware as SimulatedHardware
from ..simulator import Workload, simulate
from ..simulator.fit import Observation, fit, fit_link, steady_seconds
from ..simulator.from_hardware import hardware_of
from .accelerator import LinkSpeeds, link_speeds
from .machine import measure_links
from .recording import ProgramRecording
from .settings import AUTO, TrialSettings

__all__ = ["FittedMachine", "PredictedSteps", "fitted", "machine_of"]

_NUM_SIMULATED_STEPS = 3
_NUM_SIMULATED_FOR_FIT = 20


@dataclass(frozen=True)
class FittedMachine:
    """The machine to simulate.

    Attributes:
        hardware: the whole machine, link included.
        link: speeds of the link to its accelerator, and where they are from; None: the step does not need it.
    """

    hardware: SimulatedHardware
    link: LinkSpeeds | None


def machine_of(described: Hardware, workload: Workload, recording: ProgramRecording, seconds: float) -> FittedMachine:
    """The described machine, fitted to the recorded steps. May measure the accelerator; blocks then.

    Args:
        seconds: if fitting would take more than half of them, nothing is fitted.

    Raises:
        ConfigError: the speed of copies from or to the accelerator is not known and could not be measured.
    """
    hardware = hardware_of(described, kinds=_kinds(workload))
    if not workload.uses_device:
        return FittedMachine(fitted(hardware, workload, recording, seconds), None)
    link = link_speeds(recording.ways(), described.accelerators) or link_speeds(recording.ways(), measure_links())
    if link is None:
        what = "give a file with the link to the accelerator: the copies of the recorded steps do not tell its speed"
        raise ConfigError("hardware", None, what)
    # The host runs ahead of its accelerator, which does not wait for calls of the store.
    return _with_fitted_link(replace(hardware, call_seconds_per_record=0.0), link, workload, recording, seconds)


def fitted(
    hardware: SimulatedHardware, workload: Workload, recording: ProgramRecording, seconds: float
) -> SimulatedHardware:
    """The hardware with the contention that the recorded steps show, if half of the time is enough to find it.

    The recorded compute already contains what training lost to the store, so little contention is found. It makes the
    prediction for the recorded settings equal the measured time.
    """
    observed = Observation(workload, recording.simulated, recording.step_seconds)
    try:
        return fit(hardware, [observed]) if _can_be_fitted(hardware, recording, observed, seconds) else hardware
    except StoreFullError:  # the described machine may be another, with a smaller drive
        return hardware


def _with_fitted_link(
    hardware: SimulatedHardware, link: LinkSpeeds, workload: Workload, recording: ProgramRecording, seconds: float
) -> FittedMachine:
    """The hardware with the recorded speeds of the link, fitted if there is time. They are a little too high as
    recorded: some copies were still on their way when forward, or backward, ended."""

    def machine(factor: float) -> SimulatedHardware:
        return replace(hardware, link=link.times(factor).link)

    observed, factor = Observation(workload, recording.simulated, recording.step_seconds), 1.0
    try:
        if link.is_recorded and _can_be_fitted(machine(1.0), recording, observed, seconds):
            factor = fit_link(machine, [observed])
    except StoreFullError:
        pass
    return FittedMachine(machine(factor), link.times(factor))


def _can_be_fitted(
    hardware: SimulatedHardware, recording: ProgramRecording, observed: Observation, seconds: float
) -> bool:
    """Whether there is time for it, and only one rank. Raises StoreFullError."""
    if recording.num_ranks > 1:  # the fit does not model ranks that slow each other down
        return False
    began_at = time.monotonic()
    steady_seconds(observed.workload, hardware, observed.settings)
    return (time.monotonic() - began_at) * _NUM_SIMULATED_FOR_FIT <= seconds / 2


class PredictedSteps:
    """Predicts step times of a workload on a machine: the last of several simulated steps.

    Args:
        progress: called with the number of predictions begun.
    """

    def __init__(
        self, workload: Workload, hardware: SimulatedHardware, num_ranks: int, progress: Callable[[int], None]
    ) -> None:
        self._workload = workload
        self._hardware = hardware
        self._num_ranks = num_ranks
        self._progress = progress
        self._num_done = 0

    def predict(self, settings: TrialSettings) -> float | None:
        """See `search.Predict`. None too for `device_bytes="auto"`: the size that it finds is not known beforehand."""
        self._num_done += 1
        self._progress(self._num_done)
        if settings.device_bytes == AUTO and self._workload.uses_device:
            return None
        try:
            ranks = simulate(
                self._workload,
                self._hardware,
                settings.simulated,
                num_steps=_NUM_SIMULATED_STEPS,
                num_ranks=self._num_ranks,
            )
        except StoreFullError:
            return None
        return ranks[0][-1].seconds


def _kinds(workload: Workload) -> Mapping[str, str]:
    """For each kind of content, the sample data whose codec speeds are taken. Other kinds are left out."""
    samples = {
        "bfloat16": "activations, bfloat16",
        "float16": "activations, bfloat16",
        "float32": "activations, float32",
        "bool": "masks",
    }
    contents = {"many zeros": "relu outputs", "all zeros": "zeros"}
    found = {}
    for kind in {saved.kind for saved in workload.saved}:
        dtype, _, content = kind.partition(", ")
        if (data := contents.get(content, samples.get(dtype))) is not None:
            found[kind] = data
    return found

"""What steps of a recorded workload would take with other settings: on the machine, as the recorded steps show it."""

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
from .recording import Recording
from .settings import AUTO, TrialSettings

__all__ = ["FittedMachine", "Steps", "fitted", "machine_of"]

_NUM_SIMULATED_STEPS = 3
_NUM_SIMULATED_FOR_FIT = 20


@dataclass(frozen=True)
class FittedMachine:
    """What is simulated.

    Attributes:
        hardware: all of it.
        link: to its accelerator, and who says so; None: the step does not need it.
    """

    hardware: SimulatedHardware
    link: LinkSpeeds | None


def machine_of(described: Hardware, workload: Workload, recording: Recording, seconds: float) -> FittedMachine:
    """The machine as it was described and the recorded steps show it. May measure the accelerator; blocks then.

    Args:
        seconds: in half of them what is fitted has to be found; else nothing is.

    Raises:
        ConfigError: nobody knows how fast copies from or to the accelerator are.
    """
    hardware = hardware_of(described, kinds=_kinds(workload))
    if not workload.uses_device:
        return FittedMachine(fitted(hardware, workload, recording, seconds), None)
    link = link_speeds(recording.ways(), described.accelerators) or link_speeds(recording.ways(), measure_links())
    if link is None:
        what = "give a file with the link to the accelerator: the copies of the recorded steps do not tell its speed"
        raise ConfigError("hardware", None, what)
    # The host is ahead of its accelerator, which does not wait for calls of the store.
    return _with_fitted_link(replace(hardware, call_seconds_per_record=0.0), link, workload, recording, seconds)


def fitted(hardware: SimulatedHardware, workload: Workload, recording: Recording, seconds: float) -> SimulatedHardware:
    """With the contention that the recorded steps show, if that is found in half of the time.

    What training lost to the store in those steps is part of their compute already, so that little contention is found;
    it is what lets the predictions begin at what was measured.
    """
    observed = Observation(workload, recording.simulated, recording.step_seconds)
    try:
        return fit(hardware, [observed]) if _can_be_fitted(hardware, recording, observed, seconds) else hardware
    except StoreFullError:  # on the machine that was described, which may not be this one
        return hardware


def _with_fitted_link(
    hardware: SimulatedHardware, link: LinkSpeeds, workload: Workload, recording: Recording, seconds: float
) -> FittedMachine:
    """Likewise what the recorded copies say of the link, which is a little more than it carries: some were still on
    their way when forward, or backward, ended."""

    def machine(factor: float) -> SimulatedHardware:
        return replace(hardware, link=link.times(factor).link)

    observed, factor = Observation(workload, recording.simulated, recording.step_seconds), 1.0
    try:
        if link.is_recorded and _can_be_fitted(machine(1.0), recording, observed, seconds):
            factor = fit_link(machine, [observed])
    except StoreFullError:
        pass
    return FittedMachine(machine(factor), link.times(factor))


def _can_be_fitted(hardware: SimulatedHardware, recording: Recording, observed: Observation, seconds: float) -> bool:
    """Whether there is the time. Raises StoreFullError."""
    if recording.num_ranks > 1:  # ranks that hold each other up are not what is fitted
        return False
    began_at = time.monotonic()
    steady_seconds(observed.workload, hardware, observed.settings)
    return (time.monotonic() - began_at) * _NUM_SIMULATED_FOR_FIT <= seconds / 2


class Steps:
    """Predicts the steps of a workload on a machine, as the last of several.

    Args:
        progress: told how many were predicted.
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
        """See `search.Predict`. What "auto" would find on an accelerator nobody knows before."""
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
    """The sample data whose codec speeds stand for each kind of content; of others nothing is known."""
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

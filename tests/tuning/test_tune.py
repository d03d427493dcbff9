"""The whole of tuning, with trials that write the traces of what they pretend to be."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.existing import set_existing
from tests.tuning.conftest import HARDWARE
from tests.tuning.traces import graph_of_steps
from tierstore.errors import ConfigError
from tierstore.hardware import AcceleratorLink, Hardware
from tierstore.tuning.measurements import AcceleratorState
from tierstore.tuning.program import TrialFailedError
from tierstore.tuning.settings import TrialSettings, default_settings
from tierstore.tuning.tune import TuningPlan, memory_within, tune
from tierstore.tuning.tuned import Tuned

MIB = 2**20
OWN = TrialSettings(8 * MIB, 32 * MIB)
AUTO_BYTES = 48 * MIB
"""What "auto" finds on an accelerator."""
StepSeconds = Callable[[TrialSettings], float]


class Pretended:
    """A program whose steps take what a function of the settings says.

    Attributes:
        ran: the settings of each trial.
        pids: so many processes trace.
    """

    def __init__(self, step_seconds: StepSeconds, own: TrialSettings = OWN, device: str = "cpu") -> None:
        self.ran: list[TrialSettings] = []
        self.pids = [os.getpid()]
        self._step_seconds = step_seconds
        self._own = own
        self._device = device

    def run(self, settings: TrialSettings | None, folder: Path) -> None:
        used = self._own if settings is None else settings
        self.ran.append(used)
        for pid in self.pids:
            graph_of_steps(folder, pid, used, self._step_seconds(used), self._device, AUTO_BYTES)


@pytest.fixture
def tune_it(tmp_path: Path) -> Callable[..., Tuned]:
    def run(program: Pretended, hardware: Hardware = HARDWARE, **limits: int) -> Tuned:
        plan = TuningPlan(rounds=3, num_found=2, **limits)  # type: ignore[arg-type]
        return tune(program.run, lambda directory: hardware, plan, lambda stage, done, total=None, what="": None)

    return run


def test_program_keeps_its_settings_where_they_are_best_and_else_gets_what_was_measured_best(
    tune_it: Callable[..., Tuned],
) -> None:
    tuned = tune_it(Pretended(lambda settings: 1.0 if settings == OWN else 2.0))
    assert tuned.chosen.settings == OWN
    assert tuned.candidates[0] is tuned.chosen
    tuned = tune_it(Pretended(lambda settings: 2.0 if settings == OWN else 1.0 + settings.host_bytes / 2**40))
    assert tuned.chosen is min(tuned.candidates, key=lambda each: each.median_seconds or 0.0)
    assert tuned.chosen.settings != OWN


def test_candidates_take_turns_and_each_round_begins_with_another(tune_it: Callable[..., Tuned]) -> None:
    program = Pretended(lambda settings: 1.0)
    tuned = tune_it(program)
    num = len(tuned.candidates)
    rounds = [program.ran[1 + number * num : 1 + (number + 1) * num] for number in range(3)]
    assert all(set(each) == {candidate.settings for candidate in tuned.candidates} for each in rounds)
    assert len({each[0] for each in rounds}) == 3


def test_program_above_the_limit_is_measured_and_never_chosen(tune_it: Callable[..., Tuned]) -> None:
    tuned = tune_it(Pretended(lambda settings: 1.0 if settings == OWN else 2.0), host_bytes=24 * MIB)
    own, defaults = tuned.candidates[:2]
    assert (own.settings, own.is_allowed) == (OWN, False)
    assert defaults.settings == default_settings(24 * MIB)
    assert tuned.chosen is defaults
    assert all(settings.memory_bytes <= 24 * MIB for settings in tuned.found.predicted)


def test_reference_that_fails_ends_it(tune_it: Callable[..., Tuned]) -> None:
    program = Pretended(lambda settings: 1.0)

    def seconds(settings: TrialSettings) -> float:
        if len(program.ran) > 1:
            raise TrialFailedError("out of memory")
        return 1.0

    set_existing(program, _step_seconds=seconds)
    with pytest.raises(TrialFailedError, match="to compare with failed: out of memory"):
        tune_it(program)


def test_ranks_are_simulated_beside_each_other(tune_it: Callable[..., Tuned]) -> None:
    alone, both = Pretended(lambda settings: 1.0), Pretended(lambda settings: 1.0)
    both.pids.append(1)
    seconds = [tune_it(program).candidates[0].predicted_seconds or 0.0 for program in (alone, both)]
    assert seconds[1] > seconds[0]


def test_limit_below_any_window_or_of_an_accelerator_that_is_not_used_is_refused() -> None:
    for option, num_trials in (("host_bytes", 0), ("device_bytes", 1)):
        program, plan = Pretended(lambda settings: 1.0), TuningPlan(**{option: MIB})
        with pytest.raises(ConfigError, match=option):
            tune(program.run, lambda directory: HARDWARE, plan, lambda *stage, **_: None)
        assert len(program.ran) == num_trials


# --- on an accelerator ------------------------------------------------------------------------------------------------

SLOW_LINK = AcceleratorLink(
    name="slow", memory_bytes=0, host_memory="pinned", to_host_bytes_per_second=5e7, to_device_bytes_per_second=5e7
)
ON_DEVICE = structs.replace(HARDWARE, accelerators=(SLOW_LINK,))


def _on_device(own: TrialSettings = OWN) -> Pretended:
    """Faster with more on the device; saved are 64 MiB."""

    def seconds(settings: TrialSettings) -> float:
        device_bytes = AUTO_BYTES if settings.device_bytes == "auto" else settings.device_bytes
        return 2.0 - device_bytes / (128 * MIB)

    return Pretended(seconds, own, "cuda:0")


def test_limit_on_an_accelerator_is_used_up_and_auto_that_finds_more_is_not_chosen(
    tune_it: Callable[..., Tuned],
) -> None:
    tuned = tune_it(_on_device(), ON_DEVICE, device_bytes=32 * MIB)
    own, defaults = tuned.candidates[:2]
    assert (own.settings.device_bytes, defaults.settings.device_bytes) == (0, 32 * MIB)
    tried = {each.simulated.device_bytes for each in tuned.found.predicted}
    assert (min(tried), max(tried)) == (0, 32 * MIB)
    assert (own.predicted_seconds or 0.0) > 1.1 * (defaults.predicted_seconds or 0.0)
    assert tuned.chosen.settings.device_bytes == 32 * MIB
    (auto,) = [each for each in tuned.candidates if each.name == "auto"]
    assert (auto.found_bytes, auto.is_allowed) == (AUTO_BYTES, False)
    assert (auto.median_seconds or 0.0) < (tuned.chosen.median_seconds or 0.0)
    assert tuned.link == "copies to the host at 50 MB/s, back at 50 MB/s"


def test_program_with_auto_and_no_limit_may_keep_what_that_finds(tune_it: Callable[..., Tuned]) -> None:
    tuned = tune_it(_on_device(replace(OWN, device_bytes="auto")), ON_DEVICE)
    own, defaults = tuned.candidates[:2]
    assert (own.settings.device_bytes, own.predicted_seconds, own.is_allowed) == ("auto", None, True)
    assert (own.found_bytes, defaults.settings.device_bytes) == (AUTO_BYTES, AUTO_BYTES)
    assert tuned.chosen.device_bytes == AUTO_BYTES


def test_link_that_nobody_has_measured_is_refused(
    tune_it: Callable[..., Tuned], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.tuning.tune.measure_accelerators", lambda seconds: AcceleratorState())
    with pytest.raises(ConfigError, match="link"):
        tune_it(_on_device())


def test_limit_of_resident_memory_leaves_the_store_what_the_program_does_not_take() -> None:
    assert memory_within(1000 * MIB, 700 * MIB, 300 * MIB) == 600 * MIB
    with pytest.raises(ConfigError, match=r"the program holds 400 MiB beside its saved tensors: give \d+ MiB or more"):
        memory_within(400 * MIB, 700 * MIB, 300 * MIB)
    with pytest.raises(ConfigError, match="the system does not tell"):
        memory_within(400 * MIB, None, 300 * MIB)

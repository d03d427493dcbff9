"""The whole of tuning, with trials that write the traces of what they pretend to be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.existing import set_existing
from tests.tuning.conftest import HARDWARE
from tests.tuning.machines import machine
from tests.tuning.traces import graph_of_steps
from tierstore.errors import ConfigError
from tierstore.simulator import Drive
from tierstore.tuning.program import TrialFailedError
from tierstore.tuning.settings import TrialSettings, default_settings
from tierstore.tuning.tune import hardware_of, tune
from tierstore.tuning.tuned import Tuned

MIB = 2**20
OWN = TrialSettings(8 * MIB, 32 * MIB)
StepSeconds = Callable[[TrialSettings], float]


class Pretended:
    """A program whose steps take what a function of the settings says.

    Attributes:
        ran: the settings of each trial.
        pids: so many processes trace.
    """

    def __init__(self, step_seconds: StepSeconds, device: str = "cpu", device_bytes: int = 0) -> None:
        self.ran: list[TrialSettings] = []
        self.pids = [os.getpid()]
        self._step_seconds = step_seconds
        self._device = device, device_bytes

    def run(self, settings: TrialSettings | None, folder: Path) -> None:
        used = OWN if settings is None else settings
        self.ran.append(used)
        for pid in self.pids:
            graph_of_steps(folder, pid, used, self._step_seconds(used), *self._device)


@pytest.fixture
def tune_it(tmp_path: Path) -> Callable[..., Tuned]:
    def run(program: Pretended, **limits: int) -> Tuned:
        return tune(program.run, HARDWARE, lambda line: None, rounds=3, num_found=2, **limits)

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


def test_limit_below_any_window_is_refused_before_anything_runs(tune_it: Callable[..., Tuned]) -> None:
    program = Pretended(lambda settings: 1.0)
    with pytest.raises(ConfigError, match="host_bytes"):
        tune_it(program, host_bytes=MIB)
    assert program.ran == []


def test_program_on_an_accelerator_is_tuned_for_what_leaves_it_and_keeps_its_device_bytes(
    tune_it: Callable[..., Tuned],
) -> None:
    """Saved are 64 MiB."""
    tuned = tune_it(Pretended(lambda settings: 1.0, "cuda:0", 32 * MIB))
    assert tuned.config["offload"]["device_bytes"] == 32 * MIB
    assert max(settings.host_bytes for settings in tuned.found.predicted if settings not in (OWN,)) <= 32 * MIB


def test_machine_to_simulate_has_what_the_doctor_measured_and_is_refused_without_a_drive() -> None:
    hardware = hardware_of(HARDWARE, ["bfloat16", "uint8"])
    assert (hardware.cores, hardware.cpu_seconds_per_byte) == (2, 1 / 1e10)
    assert hardware.drive == Drive({1: 2e10, 4: 2e10}, {1: 2e10, 4: 2e10}, 1e-5, 1e-5, 500 * 2**30)
    assert {key: speed.ratio for key, speed in hardware.codecs.items()} == {
        ("bfloat16", "shuffle-zstd:1"): 0.6,
        ("uint8", "bits"): 0.125,
    }
    for missing in ({"writes": ()}, {"reads": ()}, {"write_latency_seconds": None}, {"read_latency_seconds": None}):
        with pytest.raises(ConfigError, match=r"/nvme.*it is full"):
            hardware_of(machine(drive=missing))

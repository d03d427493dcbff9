"""The whole of tuning, with trials that write the traces of what they pretend to be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.existing import set_existing
from tests.tuning.conftest import HARDWARE
from tests.tuning.traces import graph_of_steps
from tierstore.errors import ConfigError
from tierstore.tuning.program import TrialFailedError
from tierstore.tuning.settings import TrialSettings, default_settings
from tierstore.tuning.tune import TuningPlan, memory_within, tune
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

    def __init__(self, step_seconds: StepSeconds, own: TrialSettings = OWN, tensor_bytes: int = 8 * MIB) -> None:
        self.ran: list[TrialSettings] = []
        self.pids = [os.getpid()]
        self._step_seconds = step_seconds
        self._own = own
        self._tensor_bytes = tensor_bytes

    def run(self, settings: TrialSettings | None, folder: Path) -> None:
        used = self._own if settings is None else settings
        self.ran.append(used)
        for pid in self.pids:
            graph_of_steps(folder, pid, used, self._step_seconds(used), self._tensor_bytes)


@pytest.fixture
def tune_it(tmp_path: Path) -> Callable[..., Tuned]:
    def run(program: Pretended, host_bytes: int | None = None) -> Tuned:
        plan = TuningPlan(host_bytes, rounds=3, num_found=2)
        return tune(program.run, lambda directory: HARDWARE, plan, lambda stage, done, total=None, what="": None)

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


def test_candidate_that_fails_is_told_and_not_tried_again(tune_it: Callable[..., Tuned]) -> None:
    def seconds(settings: TrialSettings) -> float:
        if settings != OWN:
            raise TrialFailedError("out of memory")
        return 1.0

    program = Pretended(seconds)
    tuned = tune_it(program)
    assert tuned.chosen.settings == OWN
    assert len(tuned.candidates) > 1
    assert {each.failure for each in tuned.candidates[1:]} == {"out of memory"}
    assert len(program.ran) == 1 + 3 + len(tuned.candidates) - 1


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


def test_limit_of_resident_memory_leaves_the_store_what_the_program_does_not_take() -> None:
    assert memory_within(1000 * MIB, 700 * MIB, 300 * MIB) == 600 * MIB
    with pytest.raises(ConfigError, match=r"the program holds 400 MiB beside its saved tensors: give \d+ MiB or more"):
        memory_within(400 * MIB, 700 * MIB, 300 * MIB)
    with pytest.raises(ConfigError, match="the system does not tell"):
        memory_within(400 * MIB, None, 300 * MIB)

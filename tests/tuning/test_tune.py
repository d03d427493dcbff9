"""The whole of tuning, with trials that write the traces of what they pretend to be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.existing import set_existing
from tests.tuning.traces import graph_of_steps
from tierstore.errors import ConfigError
from tierstore.tuning.program import TrialFailedError
from tierstore.tuning.settings import TrialSettings, default_settings
from tierstore.tuning.tune import tune
from tierstore.tuning.tuned import Tuned

MIB = 2**20
OWN = TrialSettings(8 * MIB, 32 * MIB)
StepSeconds = Callable[[TrialSettings], float]


class Pretended:
    """A program whose steps take what a function of the settings says.

    Attributes:
        ran: the settings of each trial.
    """

    def __init__(self, step_seconds: StepSeconds, device: str = "cpu", device_bytes: int = 0) -> None:
        self.ran: list[TrialSettings] = []
        self._step_seconds = step_seconds
        self._device = device, device_bytes

    def run(self, settings: TrialSettings | None, folder: Path) -> None:
        used = OWN if settings is None else settings
        self.ran.append(used)
        graph_of_steps(folder, os.getpid(), used, self._step_seconds(used), *self._device)


@pytest.fixture
def tune_it(tmp_path: Path) -> Callable[..., Tuned]:
    def run(program: Pretended, **limits: int) -> Tuned:
        return tune(program.run, lambda line: None, rounds=3, num_found=2, **limits)

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


def test_dozen_is_tried_once_each_and_the_fastest_are_measured_by_turns(tune_it: Callable[..., Tuned]) -> None:
    """Each round begins with another one."""

    def seconds(settings: TrialSettings) -> float:
        return 0.5 + settings.staging_bytes / 2**40 if settings.codec == "none" else 1.0

    program = Pretended(seconds)
    tuned = tune_it(program)
    num = len(tuned.tried)
    assert num >= 7
    assert program.ran[0] == OWN
    assert program.ran[1 : 1 + num] == [each.settings for each in tuned.tried]
    own, defaults, *found = tuned.candidates
    assert own.settings == OWN
    assert defaults.settings == default_settings(OWN.memory_bytes)
    assert [(each.name, each.settings.codec, each.settings.staging_bytes) for each in found] == [
        ("found 1", "none", 28 * MIB),
        ("found 2", "none", 32 * MIB),
    ]
    rounds = program.ran[1 + num :]
    assert [{*rounds[:4]}, {*rounds[4:7]}, {*rounds[7:]}] == [
        {each.settings for each in tuned.candidates},
        *[{OWN, *(each.settings for each in found)}] * 2,
    ], "the defaults were slower"
    assert len({rounds[0], rounds[4], rounds[7]}) == 3
    assert tuned.chosen is found[0]
    assert len(found[0].step_seconds) == 3, "without the trial in which it was tried"
    assert tuned.as_dict()["tried"][num - 1]["first_seconds"] == pytest.approx(tuned.tried[-1].first_seconds)


def test_measuring_ends_when_all_were_slower_once(tune_it: Callable[..., Tuned]) -> None:
    program = Pretended(lambda settings: 1.0 if settings == OWN else 2.0)
    tuned = tune_it(program)
    assert len(program.ran) == 1 + len(tuned.tried) + len(tuned.candidates)


def test_settings_that_fail_as_they_are_tried_are_no_candidates(tune_it: Callable[..., Tuned]) -> None:
    def seconds(settings: TrialSettings) -> float:
        if settings.codec == "none":
            raise TrialFailedError("it broke")
        return 1.0

    tuned = tune_it(Pretended(seconds))
    assert {each.failure for each in tuned.tried if each.settings.codec == "none"} == {"it broke"}
    assert "none" not in {each.settings.codec for each in tuned.candidates}


def test_program_above_the_limit_is_measured_and_never_chosen(tune_it: Callable[..., Tuned]) -> None:
    tuned = tune_it(Pretended(lambda settings: 1.0 if settings == OWN else 2.0), host_bytes=24 * MIB)
    own, defaults = tuned.candidates[:2]
    assert (own.settings, own.is_allowed) == (OWN, False)
    assert defaults.settings == default_settings(24 * MIB)
    assert tuned.chosen is defaults
    assert all(each.settings.memory_bytes <= 24 * MIB for each in tuned.tried)


def test_reference_that_fails_ends_it(tune_it: Callable[..., Tuned]) -> None:
    program = Pretended(lambda settings: 1.0)

    def seconds(settings: TrialSettings) -> float:
        if len(program.ran) > 1:
            raise TrialFailedError("out of memory")
        return 1.0

    set_existing(program, _step_seconds=seconds)
    with pytest.raises(TrialFailedError, match="to compare with failed: out of memory"):
        tune_it(program)


def test_limit_below_any_window_is_refused_before_anything_runs(tune_it: Callable[..., Tuned]) -> None:
    program = Pretended(lambda settings: 1.0)
    with pytest.raises(ConfigError, match="host_bytes"):
        tune_it(program, host_bytes=MIB)
    assert program.ran == []


def test_program_on_an_accelerator_keeps_its_device_bytes(tune_it: Callable[..., Tuned]) -> None:
    tuned = tune_it(Pretended(lambda settings: 1.0, "cuda:0", 32 * MIB))
    assert tuned.config["offload"]["device_bytes"] == 32 * MIB

"""`tune_loop` on a small step, for real: every trial opens a store and trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.inspect_store import inspect_scope
from tierstore import TierStore, tiered_offload
from tierstore.errors import ConfigError, StoreFullError, TierStoreWarning
from tierstore.tuning import Tuned, tune_loop
from tierstore.tuning.program import TrialFailedError

MIB = 2**20


def _step(scope: tiered_offload) -> None:
    with scope:
        tensor = torch.randn(128, 128, requires_grad=True)
        for _ in range(4):
            tensor = torch.exp(-tensor)
        loss = tensor.sum()
    del tensor
    loss.backward()


@pytest.fixture
def tune_step(store_directory: Path) -> Callable[..., Tuned]:
    def tune(step: Callable[[tiered_offload], object] = _step, **options: object) -> Tuned:
        settings: dict[str, object] = {"host_bytes": "17MiB", "min_bytes": 0, "steps": 1, "rounds": 3}
        return tune_loop(step, store_directory, **(settings | options))  # type: ignore[arg-type]

    return tune


def test_loop_is_tuned_within_its_limit_and_the_outcome_opens_a_store(
    tune_step: Callable[..., Tuned], tmp_path: Path
) -> None:
    tuned = tune_step()
    assert tuned.candidates[0].name == "defaults"
    assert len(tuned.candidates) >= 2
    for candidate in tuned.candidates:
        assert candidate.step_seconds
        assert candidate.settings.memory_bytes <= 17 * MIB
        assert candidate.first_seconds is not None
    assert tuned.chosen in tuned.candidates
    file = tmp_path / "tierstore.toml"
    file.write_text(tuned.toml)
    with TierStore.from_config(file) as store:
        _step(tiered_offload.from_config(store, file))
        assert store.host_bytes == tuned.chosen.settings.host_bytes


def test_loop_is_told_that_it_needs_no_hardware(tune_step: Callable[..., Tuned]) -> None:
    with pytest.warns(TierStoreWarning, match="hardware"), pytest.raises(ZeroDivisionError):
        tune_step(lambda scope: 1 / 0, hardware="machine.json")


def test_loop_that_saves_nothing_is_refused(tune_step: Callable[..., Tuned]) -> None:
    def step(scope: tiered_offload) -> None:
        with scope:
            torch.randn(8)

    with pytest.raises(TrialFailedError, match="no saved tensor"):
        tune_step(step)


@pytest.mark.parametrize("error", [ZeroDivisionError, torch.OutOfMemoryError])
def test_loop_that_raises_in_the_first_trial_says_so_itself_and_leaves_no_store(
    error: type[Exception], tune_step: Callable[..., Tuned]
) -> None:
    def step(scope: tiered_offload) -> None:
        _step(scope)
        raise error

    with pytest.raises(error):
        tune_step(step)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("too much stays"), StoreFullError(9, 0, 0)])
def test_loop_settings_that_use_up_memory_have_failed_and_the_others_are_measured(
    error: Exception, tune_step: Callable[..., Tuned]
) -> None:
    raised: list[Exception] = []

    def step(scope: tiered_offload) -> None:
        if inspect_scope(scope).store.staging_bytes != 36 * MIB:
            raised.append(error)
            raise error
        _step(scope)

    tuned = tune_step(step, host_bytes="48MiB")
    failures = [each.failure for each in tuned.tried if each.settings.staging_bytes != 36 * MIB]
    assert failures
    assert set(failures) == {str(error)}
    assert len(raised) == len(failures), "what failed is not tried again"
    assert {each.settings.staging_bytes for each in tuned.candidates} == {36 * MIB}


@pytest.mark.parametrize("option", [{"steps": 0}, {"rounds": 2}, {"host_bytes": "1MiB"}, {"min_bytes": "much"}])
def test_loop_with_an_argument_that_cannot_be_used_is_refused(
    option: dict[str, object], tune_step: Callable[..., Tuned]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        tune_step(**option)

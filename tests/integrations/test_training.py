"""A training with a plan: it is made at a batch with a loss. At its end the store is closed whatever fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tierstore import ConfigError, StoreClosedError
from tierstore.integrations.training import Training, TrainingPlan
from tierstore.memory_plan.meter import ResidentMeter


class FailingPlan:
    """Cannot be removed."""

    def remove(self, model: nn.Module) -> nn.Module:
        raise ConfigError("model", "Linear", "the plan is applied to another model: give that")


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """It ends badly. The store is closed all the same."""
    training = TrainingPlan(tmp_path, {"host_bytes": "1MiB", "disk_bytes": "16MiB"}, {}).begin()
    training.plan, training._planned = FailingPlan(), nn.Linear(1, 1)  # type: ignore[assignment]
    yield training
    with pytest.raises(StoreClosedError):
        training.store.put(torch.ones(4))


def test_error_at_the_end_of_a_good_training_is_raised(training: Training) -> None:
    with pytest.raises(ConfigError, match="another model"), training:
        pass
    training.close()


def test_error_of_the_training_is_raised_and_that_of_its_end_noted(training: Training) -> None:
    with pytest.raises(ZeroDivisionError) as caught, training:
        1 / 0  # noqa: B018
    assert ["another model" in note for note in caught.value.__notes__] == [True]


def test_plan_is_made_at_the_first_batch_that_has_a_loss(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)))
    losses = iter([None, None, *[True] * 99])

    def compute() -> torch.Tensor | None:
        return model(torch.ones(64, 256)).sum() if next(losses) else None

    with TrainingPlan(tmp_path, {"host_bytes": 0}, {}, limit=ResidentMeter().level() + 2**31).begin() as training:

        def step() -> torch.Tensor | None:
            return training.run(compute, model=model, optimizers=[], loss_of=lambda found: found)

        assert step() is None, "one call to plan, one to compute"
        assert training.plan is None
        loss = step()
        assert loss is not None
        assert training.plan is not None
        loss.backward()

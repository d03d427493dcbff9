"""A training with a plan: it is made at a batch with a loss. At its end the store is closed whatever fails."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.conftest import MakeStore
from tests.device.timed import TimedDevice, narrow_windows
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


StaysBytes = Callable[..., int]


@pytest.fixture
def stays_bytes(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> StaysBytes:
    """How much may stay on an accelerator after some steps, if its link is so slow that no compute hides a copy."""
    narrow_windows(monkeypatch, 64 * 1024)
    accelerator = TimedDevice(1e6)
    store = make_store(host_bytes="1GiB", copies=accelerator)

    def after_steps(model: nn.Module, **options: Any) -> int:
        batch = torch.ones(64, 256, requires_grad=True)
        with TrainingPlan(store, None, {"min_bytes": 0, **options}).begin() as training:
            for _ in range(5):
                loss = training.run(lambda: model(batch).sum(), model=model, optimizers=[], loss_of=lambda loss: loss)
                loss.backward()
                accelerator.synchronize()
        return store.stats().device_limit_bytes

    return after_steps


def plain_model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)))


def told_to_checkpoint() -> nn.Module:
    """As transformers tells its layers."""
    model = plain_model()
    model[1].gradient_checkpointing = True  # type: ignore[index]
    return model


def wrapped_for_checkpoints() -> nn.Module:
    return nn.Sequential(*map(checkpoint_wrapper, plain_model().children()))


def test_model_without_checkpoints_keeps_on_the_accelerator_what_compute_does_not_cover(
    stays_bytes: StaysBytes,
) -> None:
    assert stays_bytes(plain_model()) > 0


@pytest.mark.parametrize("make", [told_to_checkpoint, wrapped_for_checkpoints])
def test_model_with_checkpoints_keeps_nothing_on_the_accelerator(
    stays_bytes: StaysBytes, make: Callable[[], nn.Module]
) -> None:
    assert stays_bytes(make()) == 0


@pytest.mark.parametrize("option", [{"device_bytes": 0}, {"prefetch": "reverse"}])
def test_what_the_user_says_wins(stays_bytes: StaysBytes, option: dict[str, Any]) -> None:
    """With another order "auto" finds nothing."""
    assert stays_bytes(plain_model(), **option) == 0


@pytest.mark.parametrize(("table", "chosen"), [({}, None), ({"device_bytes": 4096}, 4096)])
def test_what_a_file_says_of_device_bytes_wins(tmp_path: Path, table: dict[str, Any], chosen: int | None) -> None:
    where = {"store": {"path": tmp_path, "host_bytes": 0}, "offload": table}
    with TrainingPlan(where, None, {}).begin() as training:
        training.run(lambda: None, model=plain_model(), optimizers=[], loss_of=lambda loss: loss)
        assert training._chosen is not None
        assert training._chosen._log_options.device_bytes == chosen


@pytest.mark.parametrize(
    ("store_options", "offload_options", "told"),
    [
        ({}, {"host_bytes": "8GiB"}, "option of the store: give store_options={'host_bytes': '8GiB'}"),
        ({}, {"min_byte": 1}, "no such option; there are min_bytes, "),
        ({"host_byte": "8GiB"}, {}, "no such option; there are host_bytes, "),
        ({"host_bytes": "lots"}, {}, "host_bytes='lots' cannot be used"),
        ({"codec": "zip"}, {}, "codec='zip' cannot be used"),
    ],
)
def test_wrong_option_is_told_at_the_call(tmp_path: Path, store_options: Any, offload_options: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingPlan(tmp_path, store_options, offload_options)
    assert told in str(caught.value)


def test_wrong_option_of_a_daemon_is_told_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such option; there are host_bytes, "):
        TrainingPlan(tmp_path / "a.sock", {"disk_bytes": "8GiB"}, {})
    with pytest.raises(ConfigError, match="reconnect_seconds=-1"):
        TrainingPlan(tmp_path / "a.sock", {"reconnect_seconds": -1}, {})

"""`TierStoreCallback` with the real trainer of Lightning: the same bits, numbers in its loggers, and nothing left."""

import copy
import csv
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, all_bits
from tests.integrations.left import directory, what_is_left
from tierstore import ConfigError, TierStore
from tierstore.integrations.lightning import TierStoreCallback

pytestmark = pytest.mark.filterwarnings("default")  # the library's own


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Lightning ignores SIGINT from the first one on."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


NUM_BATCHES = 4


class Module(LightningModule):
    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Dropout(0.1), nn.Linear(SIDE, SIDE))
        self.automatic_optimization = not manual
        self.losses: list[float] = []

    def _loss(self, batch: tuple[torch.Tensor]) -> torch.Tensor:
        return self.layers(batch[0].exp()).square().mean()  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[torch.Tensor], _: int) -> torch.Tensor | None:
        loss = self._loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: tuple[torch.Tensor], _: int) -> None:
        self.log("validation", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(NUM_BATCHES * 8, SIDE, generator=generator)), batch_size=8)


def fit(path: Path, callbacks: list[Callback], module: LightningModule, **arguments: Any) -> Trainer:
    defaults = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "log_every_n_steps": 1,
        "logger": CSVLogger(str(path)),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(callbacks=callbacks, **(defaults | arguments))
    torch.manual_seed(1)
    trainer.fit(module, batches(), batches())
    return trainer


def callback_of(path: Path | TierStore) -> TierStoreCallback:
    options = None if isinstance(path, TierStore) else {"host_bytes": 0, "staging_bytes": 0}
    return TierStoreCallback(path, store_options=options, min_bytes=0)


def outcome(module: Module) -> list[Any]:
    return [*module.losses, *all_bits(module.parameters())]


def rows(trainer: Trainer) -> list[dict[str, str]]:
    with (Path(trainer.logger.log_dir) / "metrics.csv").open(encoding="utf-8") as file:  # type: ignore[union-attr,arg-type]
        return list(csv.DictReader(file))


COMBINATIONS: dict[str, tuple[Callable[[], Module], dict[str, Any]]] = {
    "plain": (Module, {}),
    "manual optimisation": (lambda: Module(manual=True), {}),
    "accumulation": (Module, {"accumulate_grad_batches": 2}),
    "bf16": (Module, {"precision": "bf16-mixed"}),
    "fast_dev_run": (Module, {"fast_dev_run": True}),
}


@pytest.mark.parametrize("case", COMBINATIONS)
def test_same_losses_and_parameters_as_without(tmp_path: Path, case: str) -> None:
    make, arguments = COMBINATIONS[case]
    drive, plain, module = directory(tmp_path), make(), make()
    fit(tmp_path, [], plain, **arguments)
    trainer = fit(tmp_path, [callback_of(drive)], module, **arguments)
    assert outcome(module) == outcome(plain)
    assert trainer.logged_metrics["tierstore/packed_gib"] > 0
    assert what_is_left(drive) == []


def test_numbers_are_in_the_loggers_row_of_the_loss_at_the_trainers_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = fit(tmp_path, [callback_of(directory(tmp_path))], Module(), log_every_n_steps=2)
    with_loss = [row for row in rows(trainer) if row["loss"]]
    assert len(with_loss) == 2 * NUM_BATCHES / 2
    packed = [float(row["tierstore/packed_gib"]) for row in with_loss]
    assert packed[0] == pytest.approx(packed[-1])  # of two steps each: since the log before
    assert packed[0] > 0
    assert capsys.readouterr().out.count("tierstore: ") == 1


def test_fit_again_opens_a_store_of_its_own(tmp_path: Path) -> None:
    drive, callback = directory(tmp_path), callback_of(directory(tmp_path))
    plain, module = Module(), Module()
    for _ in range(2):
        fit(tmp_path, [], plain)
    for _ in range(2):
        trainer = fit(tmp_path, [callback], module)
        assert trainer.logged_metrics["tierstore/packed_gib"] > 0
        assert "training_step" not in vars(trainer.strategy)
        trainer.validate(module, batches(), verbose=False)
        assert what_is_left(drive) == []
    assert outcome(module) == outcome(plain)


def test_store_that_was_open_stays_open(tmp_path: Path, make_store: MakeStore) -> None:
    store = make_store(host_bytes=0, staging_bytes=0)
    fit(tmp_path, [callback_of(store)], Module())
    stats = store.stats()
    assert stats.packed_tensors > 0
    assert stats.live_handles == 0


class Failing(Callback):
    def __init__(self, error: type[BaseException], where: str) -> None:
        self.error, self.where = error, where

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.where == "setup":
            raise self.error("as asked for")
        if self.where == "training_step":
            pl_module.training_step = self._fail  # type: ignore[method-assign]

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.where == "batch end" and trainer.global_step == 2:
            raise self.error("as asked for")

    def _fail(self, *_: Any) -> None:
        torch.randn(SIDE, SIDE, requires_grad=True).exp().tanh()
        raise self.error("as asked for")


@pytest.mark.parametrize("where", ["setup", "training_step", "batch end"])
@pytest.mark.parametrize(("error", "seen"), [(RuntimeError, RuntimeError), (KeyboardInterrupt, SystemExit)])
def test_fit_that_fails_leaves_nothing_and_can_be_begun_again(
    tmp_path: Path, where: str, error: type[BaseException], seen: type[BaseException]
) -> None:
    drive, callback = directory(tmp_path), callback_of(directory(tmp_path))
    with pytest.raises(seen) as caught:
        fit(tmp_path, [callback, Failing(error, where)], Module())
    assert what_is_left(drive) == []
    del caught  # it has held the frames, and with them all that was not ended
    trainer = fit(tmp_path, [callback], Module())
    assert trainer.logged_metrics["tierstore/packed_gib"] > 0


def test_callback_can_be_copied_before_a_fit(tmp_path: Path) -> None:
    """As strategies do that start their processes by pickling."""
    callback = copy.deepcopy(callback_of(directory(tmp_path)))
    assert fit(tmp_path, [callback], Module()).logged_metrics["tierstore/packed_gib"] > 0


def test_argument_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    drive = directory(tmp_path)
    with pytest.raises(ConfigError, match="path='/no/such/place'"):
        TierStoreCallback("/no/such/place")
    with pytest.raises(ConfigError, match="min_byte"):
        fit(tmp_path, [TierStoreCallback(drive, min_byte=0)], Module())
    with pytest.raises(ConfigError, match="leave backward to Lightning"):
        fit(tmp_path, [TierStoreCallback(drive, limit="1GiB")], Module(manual=True))
    assert what_is_left(drive) == []


def test_limit_makes_a_plan_that_is_printed_and_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, module, drive = Module(), Module(), directory(tmp_path)
    fit(tmp_path, [], plain, precision="bf16-mixed")
    trainer = fit(tmp_path, [TierStoreCallback(drive, limit="100GiB")], module, precision="bf16-mixed")
    assert all_bits(module.parameters()) == all_bits(plain.parameters())
    assert module.losses[-len(plain.losses) + 1 :] == plain.losses[1:]
    assert "It fits: nothing to do." in capsys.readouterr().out
    assert trainer.logged_metrics["tierstore/plan_measured_peak_gib"] > 0
    assert what_is_left(drive) == []

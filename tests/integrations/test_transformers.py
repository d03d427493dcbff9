"""`offload_trainer` with the real `transformers.Trainer`: the same bits, the numbers in its log, and nothing left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.conftest import MakeStore
from tests.daemon.conftest import StartDaemon, short_directory, start_daemon
from tests.device.timed import TimedDevice, narrow_windows
from tests.hooks.programs import all_bits
from tests.integrations.language import Tokens, tiny_model
from tests.integrations.left import directory, what_is_left
from tests.processes import python
from tierstore import ConfigError, StoreClosedError, TierStore
from tierstore.hooks.in_place import around_calls_of
from tierstore.integrations.training import missing_state_bytes
from tierstore.integrations.transformers import offload_trainer

__all__ = ["short_directory", "start_daemon"]

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

SPILLED = "tierstore/spilled_gib"
PACKED = "tierstore/packed_gib"
ALL_LEAVES: dict[str, Any] = {"host_bytes": 0, "staging_bytes": 0}
"""Options of a store in which no tensor stays, however small."""


def trainer_of(path: Path, model: nn.Module | None = None, **arguments: Any) -> Trainer:
    """Three steps on the CPU, each of them logged."""
    defaults = {
        "output_dir": str(path / "out"),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "logging_first_step": True,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    }
    return Trainer(
        tiny_model() if model is None else model,
        TrainingArguments(**(defaults | arguments)),
        train_dataset=Tokens(32),
        eval_dataset=Tokens(4),
    )


def outcome(trainer: Trainer) -> list[Any]:
    """All losses, of training and of evaluation, and the bits of all parameters."""
    losses = [(log.get("loss"), log.get("eval_loss"), log.get("grad_norm")) for log in trainer.state.log_history]
    return [*losses, *all_bits(trainer.model.parameters())]


def logged(trainer: Trainer, name: str = SPILLED) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


def lora() -> nn.Module:
    return get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))  # type: ignore[no-any-return]


REENTRANT = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
NOT_REENTRANT = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
COMBINATIONS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (tiny_model, {}),
    "accumulation": (tiny_model, {"gradient_accumulation_steps": 2}),
    "evaluation in between": (tiny_model, {"eval_strategy": "steps", "eval_steps": 1}),
    "bf16": (tiny_model, {"bf16": True}),
    "workers forked": (tiny_model, {"dataloader_num_workers": 2}),
    "checkpointing, reentrant": (tiny_model, REENTRANT),
    "checkpointing, not reentrant": (tiny_model, NOT_REENTRANT),
    "LoRA, checkpointing": (lora, NOT_REENTRANT),
}


@pytest.mark.parametrize("case", COMBINATIONS)
def test_same_losses_and_parameters_as_without(tmp_path: Path, case: str) -> None:
    make, arguments = COMBINATIONS[case]
    plain = trainer_of(tmp_path, make(), **arguments)
    plain.train()
    trainer = trainer_of(tmp_path, make(), **arguments)
    drive = directory(tmp_path)
    assert offload_trainer(trainer, drive, store_options=ALL_LEAVES, min_bytes=0) is trainer
    trainer.train()
    assert outcome(trainer) == outcome(plain)
    assert len(logged(trainer)) == 3
    assert sum(logged(trainer)) > 0
    assert what_is_left(drive) == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    trainer = trainer_of(tmp_path_factory.mktemp("plain"))
    trainer.train()
    return outcome(trainer)


@pytest.mark.parametrize("kind", ["open store", "open daemon", "socket", "file", "mapping"])
def test_store_is_where_it_is_wanted(
    tmp_path: Path, plain: list[Any], start_daemon: StartDaemon, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, drive, store = trainer_of(tmp_path), directory(tmp_path), None
    options: dict[str, Any] = {"min_bytes": 0}
    where: Any = {"store": {"path": str(drive), **ALL_LEAVES}, "offload": options}
    if kind == "open store":
        where = store = TierStore(drive, **ALL_LEAVES)
    elif kind == "open daemon":
        where = store = TierStore.connect(start_daemon().socket, **ALL_LEAVES)
    elif kind == "socket":
        where, options = start_daemon().socket, options | {"store_options": ALL_LEAVES}
    elif kind == "file":
        text = f'[store]\npath = "{drive}"\nhost_bytes = 0\nstaging_bytes = 0\n[offload]\nmin_bytes = 0\n'
        where, options = tmp_path / "tierstore.toml", {}
        where.write_text(text, encoding="utf-8")
    else:
        options = {}
    offload_trainer(trainer, where, **options)
    capsys.readouterr()
    trainer.train()
    assert outcome(trainer) == plain
    assert min(logged(trainer, PACKED)) > 0
    assert sum(line.startswith("tierstore: ") for line in capsys.readouterr().out.splitlines()) == 1
    if store is not None:
        assert store.stats().live_handles == 0  # it is still open
        store.close()


def test_resumed_training_same_bits(tmp_path: Path) -> None:
    def resumed(path: Path, *, offloads: bool) -> list[Any]:
        for max_steps in (2, 4):
            trainer = trainer_of(path, save_strategy="steps", save_steps=2, max_steps=max_steps)
            if offloads:
                offload_trainer(trainer, directory(tmp_path), store_options=ALL_LEAVES, min_bytes=0)
            trainer.train(resume_from_checkpoint=max_steps == 4)
        assert trainer.state.global_step == 4
        return all_bits(trainer.model.parameters())

    assert resumed(tmp_path / "stored", offloads=True) == resumed(tmp_path / "plain", offloads=False)


def test_numbers_are_in_each_log_of_training_alone_and_in_a_real_file_of_tensorboard(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, report_to="tensorboard", eval_strategy="steps", eval_steps=1)
    offload_trainer(trainer, directory(tmp_path), store_options=ALL_LEAVES, min_bytes=0)
    trainer.train()
    (file,) = (tmp_path / "out").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    for name in (SPILLED, PACKED, "tierstore/stall_seconds", "tierstore/host_peak_gib"):
        found = [event.value for event in events.Scalars(f"train/{name}")]
        assert found == pytest.approx(logged(trainer, name))
    assert min(logged(trainer, PACKED)) > 0
    trainer.evaluate()
    for log in trainer.state.log_history:
        assert any(name.startswith("tierstore/") for name in log) == ("loss" in log)


class Failing(Trainer):
    """Raises in the second step, with the graph of the batch still held by the error's frames."""

    error: type[BaseException] = RuntimeError
    left = 1

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if not self.left:
            raise self.error("as asked for")
        self.left -= 1
        return loss


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_training_that_fails_leaves_nothing_and_can_be_begun_again(tmp_path: Path, error: type[BaseException]) -> None:
    drive = directory(tmp_path)

    def failed_and_begun_again(*, offloads: bool) -> list[Any]:
        arguments = trainer_of(tmp_path).args
        trainer = Failing(model=tiny_model(), args=arguments, train_dataset=Tokens(32))
        trainer.error = error
        if offloads:
            offload_trainer(trainer, drive, store_options=ALL_LEAVES, min_bytes=0)
        with pytest.raises(error, match="as asked for") as caught:
            trainer.train()
        assert what_is_left(drive) == []
        del caught  # it has held the frames, and with them all that was not ended
        trainer.left = 100
        trainer.train()
        assert bool(logged(trainer)) == offloads
        return all_bits(trainer.model.parameters())

    assert failed_and_begun_again(offloads=True) == failed_and_begun_again(offloads=False)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such directory": ({"where": "/no/such/place"}, r"path='/no/such/place'"),
    "a number": ({"where": 7}, r"where=7.*a directory, a daemon's socket, a TOML file or an open TierStore"),
    "an unknown option of the scope": ({"min_byte": 0}, r"min_byte"),
    "options that are no mapping": ({"store_options": "host_bytes=0"}, r"store_options='host_bytes=0'.*a mapping"),
    "an unknown option of the store": ({"store_options": {"host_byte": 0}}, r"host_byte"),
    "what is stored, beside a limit": (
        {"limit": "1GiB", "min_bytes": 0},
        r"decides what is stored: leave out min_bytes",
    ),
    "no size": ({"limit": "much"}, r"limit='much'"),
    "a limit that cannot be kept": ({"limit": "1MiB"}, r"limit='1MiB' cannot be used: it cannot fit: the least is \d"),
    "no trainer": ({"trainer": 7}, r"give a transformers\.Trainer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_argument_that_cannot_be_used_is_refused_and_nothing_is_left(tmp_path: Path, case: str) -> None:
    arguments, message = REFUSED[case]
    given = {"trainer": trainer_of(tmp_path), "where": directory(tmp_path)} | arguments
    with pytest.raises(ConfigError, match=message):
        offload_trainer(**given).train()
    assert what_is_left(directory(tmp_path)) == []


def test_store_that_is_open_takes_no_options_and_one_that_was_closed_raises(
    tmp_path: Path, make_store: MakeStore
) -> None:
    store = make_store()
    with pytest.raises(ConfigError, match=r"store_options.*the store is open already"):
        offload_trainer(trainer_of(tmp_path), store, store_options={"host_bytes": 0})
    trainer = offload_trainer(trainer_of(tmp_path), store, min_bytes=0)
    with pytest.raises(ConfigError, match="offloaded already"):
        offload_trainer(trainer, store)
    store.close()
    with pytest.raises(StoreClosedError):
        trainer.train()


def test_trainers_own_offloading_is_refused_whenever_it_is_turned_on(tmp_path: Path) -> None:
    """TRL's argument too."""
    drive = directory(tmp_path)
    own = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}
    with pytest.raises(ConfigError, match=r"activation_checkpointing_kwargs=.*remove \"offload\""):
        offload_trainer(trainer_of(tmp_path, **own), drive)
    trainer = offload_trainer(trainer_of(tmp_path), drive)
    trainer.args.activation_offloading = True
    with pytest.raises(ConfigError, match=r"activation_offloading=True.*turn it off"):
        trainer.train()


def test_optional_libraries_are_imported_only_when_asked_for() -> None:
    program = (
        "import sys, tierstore; tierstore.TierStore, tierstore.tiered_offload, tierstore.offload_module\n"
        "import tierstore.integrations.training\n"
        "found = {'transformers', 'trl', 'lightning', 'pytorch_lightning', 'accelerate'} & set(sys.modules)\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    assert python("-c", program).stderr == ""


def test_limit_makes_a_plan_that_is_printed_and_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = trainer_of(tmp_path, gradient_accumulation_steps=2)
    plain.train()
    trainer, drive = trainer_of(tmp_path, gradient_accumulation_steps=2), directory(tmp_path)
    offload_trainer(trainer, drive, limit="100GiB")
    capsys.readouterr()
    trainer.train()
    assert outcome(trainer) == outcome(plain)
    assert "It fits: nothing to do." in capsys.readouterr().out
    assert logged(trainer, "tierstore/plan_measured_peak_gib")[-1] > 0
    assert what_is_left(drive) == []
    assert all(around_calls_of(module) is None for module in trainer.model.modules())


def test_room_is_left_for_the_state_that_an_optimizer_will_have() -> None:
    parameters = [nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(50), requires_grad=False)]
    assert missing_state_bytes(torch.optim.AdamW(parameters)) == 800
    assert missing_state_bytes(torch.optim.SGD(parameters, lr=1.0)) == 0
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
    assert missing_state_bytes(optimizer) == 400
    parameters[0].sum().backward()
    optimizer.step()
    assert missing_state_bytes(optimizer) == 0


class Synchronizing(TrainerCallback):
    """Waits for an accelerator at each step's end, as a step that reads its loss does."""

    def __init__(self, accelerator: TimedDevice) -> None:
        self._accelerator = accelerator

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._accelerator.synchronize()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_trainer_keeps_on_the_accelerator_what_compute_does_not_cover_unless_it_checkpoints(
    tmp_path: Path, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, checkpoints: bool
) -> None:
    narrow_windows(monkeypatch, 16 * 1024)
    accelerator = TimedDevice(1e6)
    store = make_store(host_bytes="1GiB", copies=accelerator)
    trainer = trainer_of(tmp_path, max_steps=5, **(NOT_REENTRANT if checkpoints else {}))
    trainer.add_callback(Synchronizing(accelerator))
    offload_trainer(trainer, store, min_bytes=0).train()
    assert (store.stats().device_limit_bytes > 0) is not checkpoints

"""`offload_trainer` with the real trainers of TRL: supervised, and rewards of generated text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, Trainer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.hooks.programs import all_bits
from tests.integrations.language import TEXT, WORDS, tiny_model, tiny_tokenizer
from tests.integrations.left import directory, what_is_left
from tierstore.integrations.transformers import offload_trainer

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

COMMON = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "seed": 1,
}


def saved_model(path: Path) -> Any:
    """As loaded from disk: some trainers load it once more, from where it was."""
    tiny_model().save_pretrained(path / "model")
    return LlamaForCausalLM.from_pretrained(path / "model", dtype=torch.float32)


PROMPTS = [" ".join(WORDS[start % 5 : start % 5 + 8]) for start in range(8)]


def sft(path: Path, **arguments: Any) -> Trainer:
    data = Dataset.from_dict({"text": [TEXT] * 8})
    config = SFTConfig(output_dir=str(path), max_length=32, **COMMON | arguments)
    return SFTTrainer(tiny_model(), config, train_dataset=data, processing_class=tiny_tokenizer())


def grpo(path: Path, **arguments: Any) -> Trainer:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    config = GRPOConfig(
        output_dir=str(path), num_generations=2, max_completion_length=8, **COMMON | {"beta": 0.1} | arguments
    )
    data = Dataset.from_dict({"prompt": PROMPTS})
    return GRPOTrainer(saved_model(path), reward, config, train_dataset=data, processing_class=tiny_tokenizer())


def outcome(trainer: Trainer) -> list[Any]:
    losses = [(log.get("loss"), log.get("grad_norm")) for log in trainer.state.log_history]
    return [*losses, *all_bits(trainer.model.parameters())]


@pytest.mark.parametrize("make", [sft, grpo])
def test_same_losses_and_parameters_as_without(tmp_path: Path, make: Callable[..., Trainer]) -> None:
    drive = directory(tmp_path)
    arguments = {"activation_checkpointing": True}
    plain = make(tmp_path / "plain", **arguments)
    plain.train()
    trainer = make(tmp_path / "stored", **arguments)
    offload_trainer(trainer, drive, store_options={"host_bytes": 0, "staging_bytes": 0}, min_bytes=0)
    trainer.train()
    assert outcome(trainer) == outcome(plain)
    stored = [log["tierstore/spilled_gib"] for log in trainer.state.log_history if "loss" in log]
    assert len(stored) == 2
    assert min(stored) > 0
    assert what_is_left(drive) == []

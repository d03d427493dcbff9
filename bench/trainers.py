"""What do the trainers gain by the store, and what does that cost, as their users would run them?

A decoder of six layers with random weights, whose forward saves some 800 MiB, trained by each library without and with
the store, and by checkpointing its layers, without and with the store for the inputs of the checkpoints. Each run is a
process of its own. All is default, but for the store's 64 MiB of host memory. Memory is anonymous and shared memory
that is resident, beyond that of the loaded model (`tierstore.demo.memory`).
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tierstore.demo.memory import PeakHostMemory

from .goals import Goal
from .harness import Benchmark, Figures

HOST_BYTES = "64MiB"
LAYERS, WIDTH, LENGTH, BATCH, STEPS, VOCABULARY = 6, 256, 512, 12, 5, 512

STORE = " with the store"
TRAINER, CHECKPOINTS, SFT = "transformers", "transformers, checkpoints", "TRL's SFT"
LIGHTNING = "Lightning"
LIBRARIES = (TRAINER, CHECKPOINTS, SFT, LIGHTNING)


def goals() -> Iterator[Goal]:
    for library in LIBRARIES:
        ours, of = library + STORE, (library,)
        yield Goal(f"{library}: last loss, bit for bit", "last_loss", ours, equals=1, of=of)
        if library != CHECKPOINTS:
            yield Goal(f"{library}: added, of plain's", "added_bytes", ours, at_most=0.6, of=of)
            yield Goal(f"{library}: step, of plain's", "step_seconds", ours, at_most=1.3, of=of)
    what = "checkpoints' inputs: step, of checkpointing alone"
    yield Goal(what, "step_seconds", CHECKPOINTS + STORE, at_most=1.05, of=(CHECKPOINTS,))


BENCHMARK = Benchmark(
    name="trainers",
    question="Memory that a trainer's process adds to the loaded model, and its step, without and with the store",
    variants=tuple(library + suffix for library in LIBRARIES for suffix in ("", STORE)),
    rounds=3,
    timeout_seconds=600,
    plotted=("added_bytes", "step_seconds"),
    goals=tuple(goals()),
)


def model_of() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
    )


def tokens() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


class Steps:
    """The times of the ends of steps, and what the libraries' own callbacks tell: losses, and what was stored."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []
        self.packed_gib = 0.0

    def log(self, values: dict[str, Any]) -> None:
        if "loss" in values:
            self.losses.append(float(values["loss"]))
        self.packed_gib = float(values.get("tierstore/packed_gib", self.packed_gib))


def measure(variant: str, scratch: Path) -> Figures:
    warnings.simplefilter("ignore")
    library = variant.removesuffix(STORE)
    store = scratch if variant.endswith(STORE) else None
    steps = Steps()
    train = (lightning if library == LIGHTNING else transformers)(library, store, scratch, steps)
    with PeakHostMemory() as memory:
        train()
        added_bytes = memory.added_bytes
    times = [after - before for before, after in pairwise(steps.ends)]
    figures = {"added_bytes": added_bytes, "step_seconds": statistics.median(times), "last_loss": steps.losses[-1]}
    return figures | ({"stored_bytes": steps.packed_gib * 2**30} if steps.packed_gib else {})


def transformers(library: str, store: Path | None, scratch: Path, steps: Steps) -> Callable[[], object]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tierstore.integrations.transformers import offload_trainer

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.ends.append(time.perf_counter())

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            steps.log(logs)

    options = {
        "output_dir": str(scratch / "out"),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "activation_checkpointing": library == CHECKPOINTS,
    }
    if library == SFT:
        trainer = sft_trainer(options)
    else:
        trainer = Trainer(model_of(), TrainingArguments(**options), train_dataset=tokens())
    trainer.add_callback(Watch)
    if store is not None:
        offload_trainer(trainer, store, store_options={"host_bytes": HOST_BYTES})
    return trainer.train


def sft_trainer(options: dict[str, Any]) -> Any:
    """TRL's, with data that is tokens already, and a tokenizer that it wants all the same."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2")
    data = Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in tokens()]})
    config = SFTConfig(**options, bf16=False, max_length=LENGTH)
    return SFTTrainer(model_of(), config, train_dataset=data, processing_class=tokenizer)


def lightning(library: str, store: Path | None, scratch: Path, steps: Steps) -> Callable[[], object]:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from tierstore.integrations.lightning import TierStoreCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=5e-5)

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            steps.ends.append(time.perf_counter())
            steps.log({name: value.item() for name, value in trainer.callback_metrics.items()})

    stores = [] if store is None else [TierStoreCallback(store, store_options={"host_bytes": HOST_BYTES})]
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*stores, Watch()],
    )
    module, data = Module(), DataLoader(tokens(), batch_size=BATCH)
    return lambda: trainer.fit(module, data)

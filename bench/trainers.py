"""What do the trainers gain by the store, and what does that cost, as their users would run them?

A decoder of six layers with random weights, whose forward saves some 800 MiB, trained by each library without and
with the store, and by checkpointing its layers, without and with the store for the inputs of the checkpoints. Each run
is a process of its own, in the default environment. The optimizer and everything else are the libraries' defaults; the
store gets 64 MiB of host memory, and all its other options are the default.

Memory is anonymous and shared memory that is resident, beyond that of the loaded model (`tierstore.demo.memory`).
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tierstore.demo.memory import PeakHostMemory

from .goals import Goal
from .harness import Benchmark, main_of_one_variant

HOST_BYTES = "64MiB"
LAYERS, WIDTH, LENGTH, BATCH, STEPS, VOCABULARY = 6, 256, 512, 12, 5, 512

STORE = " with the store"
TRAINER, CHECKPOINTS, SFT = "transformers", "transformers, checkpoints", "TRL's SFT"
LIGHTNING, ACCELERATE = "Lightning", "accelerate"
LIBRARIES = (TRAINER, CHECKPOINTS, SFT, LIGHTNING, ACCELERATE)


def goals() -> Iterator[Goal]:
    """The store costs no bit, and less memory is added."""
    for library in LIBRARIES:
        yield Goal(f"{library}: last loss, bit for bit", "last_loss", library + STORE, equals=1, of=(library,))
        if library != CHECKPOINTS:
            yield Goal(f"{library}: added, of plain's", "added_bytes", library + STORE, at_most=0.6, of=(library,))
            yield Goal(f"{library}: step, of plain's", "step_seconds", library + STORE, at_most=1.3, of=(library,))
    yield Goal(
        "checkpoints' inputs: step, of checkpointing alone",
        "step_seconds",
        CHECKPOINTS + STORE,
        at_most=1.05,
        of=(CHECKPOINTS,),
    )


BENCHMARK = Benchmark(
    name="trainers",
    question="Memory that a trainer's process adds to the loaded model, and its step, without and with the store",
    variants=tuple(library + suffix for library in LIBRARIES for suffix in ("", STORE)),
    compare="none",
    settings={
        "host_bytes": HOST_BYTES,
        "layers": LAYERS,
        "width": WIDTH,
        "tokens": BATCH * LENGTH,
        "steps": STEPS,
    },
    timeout_seconds=600,
    plotted=("added_bytes", "step_seconds"),
    goals=tuple(goals()),
)


def model_of() -> nn.Module:
    """Random weights, the same every time."""
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


class Tokens(torch.utils.data.Dataset):
    """Random tokens, the same every time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Steps:
    """The times between the ends of steps, and the losses, as the libraries' own callbacks tell them."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self.losses: list[float] = []
        self.packed_bytes = 0.0

    def end(self) -> None:
        self._ends.append(time.perf_counter())

    def log(self, values: dict[str, Any]) -> None:
        if "loss" in values:
            self.losses.append(float(values["loss"]))
        self.packed_bytes = float(values.get("tierstore/packed_gib", self.packed_bytes / 2**30)) * 2**30

    def figures(self, added_bytes: int) -> dict[str, float]:
        """The first step is warm-up."""
        times = [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
        figures = {"added_bytes": added_bytes, "step_seconds": statistics.median(times), "last_loss": self.losses[-1]}
        return figures | ({"stored_bytes": self.packed_bytes} if self.packed_bytes else {})


def measure(variant: str, scratch: Path) -> dict[str, float]:
    """One training in this process."""
    warnings.simplefilter("ignore")
    library = variant.removesuffix(STORE)
    store = scratch if variant.endswith(STORE) else None
    run = {
        TRAINER: transformers,
        CHECKPOINTS: transformers,
        SFT: transformers,
        LIGHTNING: lightning,
        ACCELERATE: accelerate,
    }
    steps = Steps()
    train = run[library](library, store, scratch, steps)
    with PeakHostMemory() as memory:
        train()
        return steps.figures(memory.added_bytes)


def transformers(library: str, store: Path | None, scratch: Path, steps: Steps) -> Callable[[], object]:
    """The trainer of transformers, or TRL's, with its defaults."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.end()

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
        trainer = sft_trainer(options, scratch)
    else:
        trainer = Trainer(model_of(), TrainingArguments(**options), train_dataset=Tokens())
    trainer.add_callback(Watch)
    if store is not None:
        from tierstore.integrations.transformers import offload_trainer

        offload_trainer(trainer, store, store_options={"host_bytes": HOST_BYTES})
    return trainer.train


def sft_trainer(options: dict[str, Any], scratch: Path) -> Any:
    """TRL's, with data that is tokens already, and a tokenizer that it wants all the same."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2")
    data = Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in Tokens()]})
    config = SFTConfig(**options, bf16=False, max_length=LENGTH)
    return SFTTrainer(model_of(), config, train_dataset=data, processing_class=tokenizer)


def lightning(library: str, store: Path | None, scratch: Path, steps: Steps) -> Callable[[], object]:
    """Lightning's trainer."""
    from lightning.pytorch import Callback, LightningModule, Trainer

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
            steps.end()
            steps.log({name: value.item() for name, value in trainer.callback_metrics.items()})

    callbacks: list[Any] = [Watch()]
    if store is not None:
        from tierstore.integrations.lightning import TierStoreCallback

        callbacks.insert(0, TierStoreCallback(store, store_options={"host_bytes": HOST_BYTES}))
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    module, data = Module(), DataLoader(Tokens(), batch_size=BATCH)
    return lambda: trainer.fit(module, data)


def accelerate(library: str, store: Path | None, scratch: Path, steps: Steps) -> Callable[[], object]:
    """A loop of one's own with accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Tokens(), batch_size=BATCH))

    def loop(forward: Callable[[], AbstractContextManager[object]], stored: Callable[[], dict[str, float]]) -> None:
        for batch in loader:
            with forward():
                loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps.end()
            steps.log({"loss": loss.item()} | stored())

    def train() -> None:
        if store is None:
            loop(nullcontext, dict)
            return
        from tierstore import TierStore, tiered_offload

        with TierStore(store, host_bytes=HOST_BYTES) as opened:
            scope, stats = tiered_offload(opened), [opened.stats()]

            def stored() -> dict[str, float]:
                stats.append(opened.stats())
                return stats[-1].as_metrics(stats[-2])

            loop(lambda: scope, stored)

    return train


if __name__ == "__main__":
    main_of_one_variant(measure)

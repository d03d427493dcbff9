"""Architectures of transformers train to the same bits under a store as without it, and leave nothing in the store.

Nothing is downloaded: models are built from configurations. The sizes keep what makes each architecture different,
such as heads that share keys, experts that some tokens go to, two kinds of block, a scan over time, and little else. By
default each architecture runs in each mode once, and the ways of a step take turns; the other pairs are `slow`.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

from tests.census import Census
from tests.hooks.programs import Around, Results, Settle, assert_same_bits, run_offloaded, run_plain
from tierstore import TierStore

# The older name of `activation_checkpointing_enable`, the only one that all releases since 5.0 know.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")

Batch = dict[str, Tensor]
Model = transformers.PreTrainedModel
NUM_STEPS, _WORDS = 3, 67


class Architecture(NamedTuple):
    config: Callable[..., transformers.PreTrainedConfig]
    options: dict[str, Any]
    model: type[Model]
    make_batch: Callable[[], Batch]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def _text() -> Batch:
    words = torch.randint(3, _WORDS, (3, 12))
    return {"input_ids": words, "labels": words.clone()}


def _padded_text() -> Batch:
    batch = _text()
    present = torch.arange(12) < torch.tensor([[12], [9], [5]])
    batch["labels"][~present] = -100
    return batch | {"attention_mask": present.long()}


def _images() -> Batch:
    return {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.randint(5, (3,))}


_adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
_sgd = functools.partial(torch.optim.SGD, lr=1e-1, momentum=0.9)
_SPECIAL = {"vocab_size": _WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "attention_dropout": 0.1, **_SPECIAL,
}  # fmt: skip
_BERT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
ARCHITECTURES = {
    "gpt2": Architecture(
        transformers.GPT2Config, {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, **_SPECIAL},
        transformers.GPT2LMHeadModel, _text, _adamw,
    ),
    "llama": Architecture(
        transformers.LlamaConfig, _LLAMA, transformers.LlamaForCausalLM, _padded_text, _adamw
    ),
    "bert": Architecture(
        transformers.BertConfig, {"vocab_size": _WORDS, "max_position_embeddings": 16, **_BERT},
        transformers.BertForMaskedLM, _padded_text, _adamw,
    ),
    "t5": Architecture(
        transformers.T5Config,
        {"vocab_size": _WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "dropout_rate": 0.1, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
        transformers.T5ForConditionalGeneration, _padded_text, _sgd,
    ),
    "vit": Architecture(
        transformers.ViTConfig, {"image_size": 16, "patch_size": 4, "num_labels": 5, **_BERT},
        transformers.ViTForImageClassification, _images, _adamw,
    ),
    "resnet": Architecture(
        transformers.ResNetConfig, {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 1], "num_labels": 5},
        transformers.ResNetForImageClassification, _images, _sgd,
    ),
    "mamba": Architecture(
        transformers.MambaConfig, {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, **_SPECIAL},
        transformers.MambaForCausalLM, _text, _adamw,
    ),
    "mixtral": Architecture(
        transformers.MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_jitter_noise": 0.1,
         **_LLAMA},
        transformers.MixtralForCausalLM, _padded_text, _sgd,
    ),
}  # fmt: skip


def build(name: str, mode: str = "plain", **options: str) -> Model:
    """The model of that name, to be trained; `options` such as `attn_implementation` go to its configuration."""
    architecture = ARCHITECTURES[name]
    config = architecture.config(**architecture.options)
    for option, choice in options.items():
        setattr(config, f"_{option}", choice)
    model = architecture.model(config).train()
    if mode.endswith("checkpoint"):
        use_reentrant = mode.startswith("reentrant")
        if model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        for block in model.modules():  # transformers has no checkpointing of ResNet: it is put around each block here
            if isinstance(block, ResNetBottleNeckLayer):
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)  # type: ignore[method-assign]
    return model


MODES = ("plain", "autocast", "checkpoint", "reentrant checkpoint")
Forward = Callable[[], Tensor]
Step = Callable[[Forward, Model, Around, Settle, int], None]


def backward_outside(forward: Forward, model: Model, around: Around, settle: Settle, number: int) -> None:
    with around():
        loss = forward()
    settle()
    loss.backward()


def backward_inside(forward: Forward, model: Model, around: Around, settle: Settle, number: int) -> None:
    with around():
        loss = forward()
        settle()
        loss.backward()


def two_micro_batches(forward: Forward, model: Model, around: Around, settle: Settle, number: int) -> None:
    """Both forwards before any backward; the first's comes last in every other step."""
    losses = []
    for _ in range(2):
        with around():
            losses.append(forward() / 2)
    settle()
    while losses:
        losses.pop(number % 2 - 1).backward()


def evaluation_around_training(forward: Forward, model: Model, around: Around, settle: Settle, number: int) -> None:
    """Without gradients, before the forward that is trained on and between it and its backward."""

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            forward()
        model.train()

    with around():
        evaluate()
        loss = forward()
        evaluate()
    settle()
    loss.backward()


STEPS = (backward_outside, backward_inside, two_micro_batches, evaluation_around_training)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierStore]:
    """Keeps nothing in memory; forward waits for its writes and backward is read ahead piece by piece."""
    directory = tmp_path_factory.mktemp("drive")
    with TierStore(directory, host_bytes=0, staging_bytes="256KiB", disk_bytes="1GiB", codec="shuffle-zstd") as store:
        yield store
    assert list(directory.iterdir()) == []


def assert_same_training(
    store: TierStore, census: Census, name: str, make: Callable[[], Model], mode: str, step: Step
) -> int:
    """Losses, gradients and the final state are the same, and nothing is left. Returns the bytes that were packed."""
    architecture = ARCHITECTURES[name]

    def program(around: Around, settle: Settle) -> Results:
        model, results = make(), []
        optimizer = architecture.optimizer(each for each in model.parameters() if each.requires_grad)

        def forward() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext():
                loss: Tensor = model(**architecture.make_batch()).loss
            assert loss.isfinite()
            results.append(loss.detach())
            return loss

        for number in range(NUM_STEPS):
            # In every other step what is to be written is on disk before backward; in others it is under way.
            step(forward, model, around, settle if number % 2 == 0 else lambda: None, number)
            results.extend(None if each.grad is None else each.grad.clone() for each in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return [*results, *model.state_dict().values()]

    before = store.stats()
    found = run_offloaded(program, store)
    gc.collect()
    store.flush()  # a write that ran when its graph ended is over now
    after = store.stats()
    assert_same_bits(found, run_plain(program))
    assert store.stats() == after, "the plain run met the store"
    assert after.spilled_bytes > before.spilled_bytes
    assert after.restored_bytes > before.restored_bytes
    held = (after.live_handles, after.host_bytes, after.disk_bytes, after.lent_bytes, after.staging_used_bytes)
    assert held == (0, 0, 0, 0, 0)
    census.count("architectures of transformers", "bitwise the same")
    return after.packed_bytes - before.packed_bytes


# An evaluation goes through the checkpoint of a block of ResNet, too.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in range(1, len(STEPS)))])
def test_architecture_trained_same_bits(store: TierStore, census: Census, name: str, turn: int) -> None:
    for column, mode in enumerate(MODES):
        step = STEPS[(list(ARCHITECTURES).index(name) + column + turn) % len(STEPS)]
        packed_bytes = assert_same_training(store, census, name, functools.partial(build, name, mode), mode, step)
        packed_bytes //= 1 + (step is two_micro_batches)
        if mode == "plain":
            plain_bytes = packed_bytes
        elif mode.endswith("checkpoint") and step is not backward_inside:  # which saves what it computes again
            assert packed_bytes < plain_bytes


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"attn_implementation": "eager"}) for name in ("gpt2", "llama", "bert", "t5", "vit")),
        *(("mixtral", {"experts_implementation": each}) for each in ("eager", "batched_mm", "grouped_mm")),
    ],
)
def test_implementation_same_bits(store: TierStore, census: Census, name: str, options: dict[str, str]) -> None:
    assert_same_training(store, census, name, lambda: build(name, **options), "plain", backward_outside)

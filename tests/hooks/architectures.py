"""Architectures of transformers, as small as they get, with random weights, and how they are trained.

Nothing is downloaded: models are built from configurations. The sizes keep what makes each architecture different
(heads that share keys, experts that some tokens go to, two kinds of block, a scan over time) and little else.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

from tests.hooks.programs import Around, Bits, bits

Batch = dict[str, torch.Tensor]

NUM_STEPS = 3
_WORDS = 67
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Architecture(NamedTuple):
    make_config: Callable[[], transformers.PreTrainedConfig]
    model: type[transformers.PreTrainedModel]
    make_batch: Callable[[], Batch]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    attention: bool
    """It has the choice between eager and sdpa attention."""


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

_LLAMA = {
    "vocab_size": _WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, **_SPECIAL,
}  # fmt: skip
_BERT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip


def _gpt2() -> transformers.PreTrainedConfig:
    return transformers.GPT2Config(vocab_size=_WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=4, **_SPECIAL)


def _llama() -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(**_LLAMA, attention_dropout=0.1)


def _bert() -> transformers.PreTrainedConfig:
    return transformers.BertConfig(vocab_size=_WORDS, max_position_embeddings=16, **_BERT)


def _t5() -> transformers.PreTrainedConfig:
    return transformers.T5Config(
        vocab_size=_WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.1,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip


def _vit() -> transformers.PreTrainedConfig:
    return transformers.ViTConfig(**_BERT, image_size=16, patch_size=4, num_labels=5)


def _resnet() -> transformers.PreTrainedConfig:
    return transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 1], num_labels=5)


def _mamba() -> transformers.PreTrainedConfig:
    return transformers.MambaConfig(vocab_size=_WORDS, hidden_size=32, num_hidden_layers=2, state_size=4, **_SPECIAL)


def _mixtral() -> transformers.PreTrainedConfig:
    return transformers.MixtralConfig(
        **_LLAMA, attention_dropout=0.1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_jitter_noise=0.1,
    )  # fmt: skip


ARCHITECTURES = {
    "gpt2": Architecture(_gpt2, transformers.GPT2LMHeadModel, _text, _adamw, True),
    "llama": Architecture(_llama, transformers.LlamaForCausalLM, _padded_text, _adamw, True),
    "bert": Architecture(_bert, transformers.BertForMaskedLM, _padded_text, _adamw, True),
    "t5": Architecture(_t5, transformers.T5ForConditionalGeneration, _padded_text, _sgd, True),
    "vit": Architecture(_vit, transformers.ViTForImageClassification, _images, _adamw, True),
    "resnet": Architecture(_resnet, transformers.ResNetForImageClassification, _images, _sgd, False),
    "mamba": Architecture(_mamba, transformers.MambaForCausalLM, _text, _adamw, False),
    "mixtral": Architecture(_mixtral, transformers.MixtralForCausalLM, _padded_text, _sgd, True),
}


def build(name: str, **options: str) -> transformers.PreTrainedModel:
    """The model of that name, to be trained; `options` such as `attn_implementation` go to its configuration."""
    architecture = ARCHITECTURES[name]
    config = architecture.make_config()
    for option, choice in options.items():
        setattr(config, f"_{option}", choice)
    return architecture.model(config).train()


def checkpoint_blocks(model: transformers.PreTrainedModel, use_reentrant: bool) -> None:
    """Every block keeps its inputs only, and is computed again in backward."""
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return
    for block in model.modules():  # transformers has no checkpointing of ResNet: it is put around each block here
        if isinstance(block, ResNetBottleNeckLayer):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)  # type: ignore[method-assign]


def _bfloat16() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


class Mode(NamedTuple):
    cast: Around
    prepare: Callable[[transformers.PreTrainedModel], None]


MODES = {
    "plain": Mode(nullcontext, lambda model: None),
    "autocast": Mode(_bfloat16, lambda model: None),
    "checkpoint": Mode(nullcontext, functools.partial(checkpoint_blocks, use_reentrant=False)),
    "reentrant checkpoint": Mode(nullcontext, functools.partial(checkpoint_blocks, use_reentrant=True)),
}


class Adapter(nn.Module):
    """A frozen linear layer, and beside it a product of two small trained matrices."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.frozen(hidden) + self.up(self.down(self.dropout(hidden)))


def add_adapters(model: transformers.PreTrainedModel) -> None:
    """Only adapters of the queries and values are trained from now on."""
    model.requires_grad_(False)
    for block in model.model.layers:
        block.self_attn.q_proj = Adapter(block.self_attn.q_proj)
        block.self_attn.v_proj = Adapter(block.self_attn.v_proj)


class Surroundings(NamedTuple):
    """What differs between a run that offloads and one that does not."""

    around: Around = nullcontext
    settle: Callable[[], object] = lambda: None
    """Called before backward."""
    end_step: Callable[[], object] = lambda: None
    """Called when nothing of the step is left but parameters and the optimizer's state."""


Step = Callable[["Training", int], None]


class Training:
    """Some steps of training, and the bits of all that they compute, by name."""

    def __init__(self, model: transformers.PreTrainedModel, name: str, mode: str, surroundings: Surroundings) -> None:
        self.model = model
        self.architecture = ARCHITECTURES[name]
        self.mode = MODES[mode]
        self.surroundings = surroundings
        self.mode.prepare(model)
        self.optimizer = self.architecture.optimizer(p for p in model.parameters() if p.requires_grad)
        self.bits: dict[str, Bits] = {}

    def run(self, step: Step) -> dict[str, Bits]:
        for number in range(NUM_STEPS):
            step(self, number)
            self._record({f"step {number}: gradient of {key}": p.grad for key, p in self.model.named_parameters()})
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.surroundings.end_step()
        self._record({f"at the end: {key}": tensor for key, tensor in self.model.state_dict().items()})
        return self.bits

    def forward(self, label: str) -> torch.Tensor:
        with self.mode.cast():
            loss: torch.Tensor = self.model(**self.architecture.make_batch()).loss
        assert loss.isfinite()
        self._record({f"{label}: loss": loss})
        return loss

    def settle(self, number: int) -> None:
        """Before backward. In every other step what is to be written is on disk by then; in others it is under way."""
        if number % 2 == 0:
            self.surroundings.settle()

    def _record(self, tensors: dict[str, torch.Tensor | None]) -> None:
        self.bits |= {name: bits(tensor) for name, tensor in tensors.items()}

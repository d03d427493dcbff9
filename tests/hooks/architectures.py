"""Small models of well-known architectures, from transformers, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["ARCHITECTURES", "Batch", "checkpoint_blocks", "make_batch"]

Batch = Mapping[str, torch.Tensor]

_WIDTH, _LAYERS, _HEADS, _TOKENS, _VOCABULARY = 64, 2, 4, 32, 64
_DECODER: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "vocab_size": _VOCABULARY,
}


def _gpt2() -> nn.Module:
    sizes = {"n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS, "n_positions": _TOKENS}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, vocab_size=_VOCABULARY, bos_token_id=0, eos_token_id=0))


def _llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER, num_key_value_heads=2))


def _bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**_DECODER))


def _t5() -> nn.Module:
    sizes = {"d_model": _WIDTH, "d_kv": 16, "d_ff": 2 * _WIDTH, "num_layers": _LAYERS, "num_heads": _HEADS}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, vocab_size=_VOCABULARY, decoder_start_token_id=0))


def _vit() -> nn.Module:
    sizes = {name: value for name, value in _DECODER.items() if name != "vocab_size"}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5))


def _resnet() -> nn.Module:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5, num_channels=3
    )
    return hf.ResNetForImageClassification(config)


def _mamba() -> nn.Module:
    config = hf.MambaConfig(
        hidden_size=_WIDTH, num_hidden_layers=_LAYERS, state_size=8, vocab_size=_VOCABULARY, use_mambapy=False
    )
    return hf.MambaForCausalLM(config)


def _mixture_of_experts() -> nn.Module:
    config = hf.MixtralConfig(
        **_DECODER, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    return hf.MixtralForCausalLM(config)


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": _gpt2,
    "Llama": _llama,
    "BERT": _bert,
    "T5": _t5,
    "ViT": _vit,
    "ResNet": _resnet,
    "Mamba": _mamba,
    "mixture of experts": _mixture_of_experts,
}


def make_batch(name: str, seed: int, rows: int = 4) -> Batch:
    """Inputs and labels for one step."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("ViT", "ResNet"):
        return {
            "pixel_values": torch.randn(rows, 3, 16, 16, generator=generator),
            "labels": torch.randint(5, (rows,), generator=generator),
        }
    tokens = torch.randint(_VOCABULARY, (rows, _TOKENS), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def checkpoint_blocks(model: nn.Module, *, use_reentrant: bool) -> None:
    """Recompute every block in backward: as transformers does it, or block by block where it does not (ResNet)."""
    if isinstance(model, hf.ResNetForImageClassification):
        for stage in model.resnet.encoder.stages:
            stage.forward = partial(checkpoint, stage.forward, use_reentrant=use_reentrant)
    else:
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})

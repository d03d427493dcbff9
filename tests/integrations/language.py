"""A tiny language model with random weights, a tokenizer, and text: made here, since nothing may be downloaded."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "the store moves what autograd saves to a drive and brings it back before backward asks for it"
WORDS = TEXT.split()
LENGTH = 32


def tiny_model(layers: int = 2) -> LlamaForCausalLM:
    """The same weights every time. Saves some 60 KiB a layer for a batch of two."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS) + 4,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            attention_dropout=0.1,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def tiny_tokenizer() -> Any:
    vocabulary = {
        word: number for number, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *dict.fromkeys(WORDS)])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random token sequences, each its own label."""

    def __init__(self, number: int) -> None:
        self._tokens = torch.randint(4, 16, (number, LENGTH), generator=torch.Generator().manual_seed(number))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}

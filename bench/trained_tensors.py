"""What real training saves for backward: tensors of two small models that were trained on text for some hundred steps,
once for all runs, kept in a file. Untrained weights and made-up data flatter every codec.

| kind | what it is | |---|---| | noise | random bytes, as encrypted or already compressed data | | activations,
bfloat16 | what a transformer in bfloat16 saves: inputs of linear layers, GELU, norms, q, k, v | | activations, float32
| the same model in float32 | | relu outputs | float32, of a convolutional model; most elements are 0 | | masks | bool,
of dropout with p = 0.1, one byte an element |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from tierstore.demo.model import ByteTransformer, ModelShape, random_batch
from tierstore.demo.settings import load_text

KINDS = ("noise", "activations, bfloat16", "activations, float32", "relu outputs", "masks", "zeros")
SET_BYTES = 96 * 2**20
"""About as many bytes of each kind, in records of 8 MiB. With six of 16 MiB four lanes encode four of them, then two,
and one of these takes three times as long as the first ones: what is measured is that last one."""

_SHAPE = ModelShape(layers=4, width=256, heads=4, context=256)
_STEPS = 250
_BATCH = 4
_SMALLEST_BYTES = 2**20  # what the hooks would leave where it is


class ByteConvolutions(nn.Module):
    """Predicts the next byte from the last 25 through causal convolutions, ReLU and dropout."""

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, 9) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        for convolution in self.convolutions:
            x = functional.relu(convolution(functional.pad(x, (8, 0))))
            x, _ = torch.native_dropout(x, 0.1, True)  # what accelerators run: its mask is bool
        return functional.cross_entropy(self.head(x.transpose(1, 2)).flatten(0, 1), targets.flatten())


def tensors_of_kind(kind: str, directory: Path) -> list[Tensor]:
    """The set of tensors of one kind; made at the first use and kept in a folder of `directory`."""
    if not _file_of(kind, directory).exists():
        for made, tensors in _make(kind).items():
            _save(tensors, _file_of(made, directory))
    loaded: list[Tensor] = torch.load(_file_of(kind, directory))
    return loaded


def _file_of(kind: str, directory: Path) -> Path:
    return directory / "tierstore-bench-tensors" / f"{kind.replace(',', '').replace(' ', '-')}.pt"


def _save(tensors: list[Tensor], file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    torch.save(tensors, unfinished)
    os.replace(unfinished, file)


def _make(kind: str) -> dict[str, list[Tensor]]:
    if kind == "noise":
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randint(-(2**63), 2**63 - 1, (2**20,), generator=generator) for _ in range(SET_BYTES >> 23)]
        return {kind: [row.view(torch.float32) for row in rows]}
    if kind == "zeros":
        return {kind: [torch.zeros(2**21) for _ in range(SET_BYTES >> 23)]}
    if kind.startswith("activations"):
        model = _trained(ByteTransformer(_SHAPE))
        return {
            "activations, float32": _saved_by(model, 12),
            "activations, bfloat16": _saved_by(model.to(torch.bfloat16), 24),
        }
    model = _trained(ByteConvolutions(256))
    return {
        "relu outputs": _saved_by(model, 32, lambda tensor: bool((tensor == 0).float().mean() > 0.3)),
        "masks": _saved_by(model, 64, lambda tensor: tensor.dtype == torch.bool),
    }


def _trained(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for batch in _batches(_BATCH, _STEPS):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _saved_by(model: nn.Module, batch: int, wanted: Callable[[Tensor], bool] = lambda _: True) -> list[Tensor]:
    """Each storage of the saved tensors once, as a flat tensor, of as many forwards as fill the set."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    tensors: list[Tensor] = []
    for inputs in _batches(batch, 100):
        storages: dict[int, Tensor] = {}

        def pack(tensor: Tensor, storages: dict[int, Tensor] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.detach()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(*inputs)
        for address, tensor in storages.items():
            flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            if address not in parameters and flat.nbytes >= _SMALLEST_BYTES and wanted(flat):
                tensors.append(flat.clone())
            if sum(each.nbytes for each in tensors) >= SET_BYTES:
                return tensors
        del loss
    raise AssertionError("no forward saves such tensors")


def _batches(batch: int, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
    corpus = torch.frombuffer(bytearray(load_text(None, _SHAPE.context + 1)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield random_batch(corpus, batch, _SHAPE.context, generator)

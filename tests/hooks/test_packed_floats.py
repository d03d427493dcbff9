"""Trainings whose saved tensors all go to disk with packed exponents: the same bits as plain ones, or an error."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.conftest import MakeStore
from tests.descriptors import descriptors_of
from tests.hooks.programs import assert_same_gradients, training_of
from tests.store.test_floats import BOTH_WAYS, use
from tierstore import CorruptDataError, TierStore
from tierstore.demo.model import ByteTransformer, ModelShape, random_batch
from tierstore.disk.codec.codec import FLOATS, encode_block
from tierstore.disk.scratch import Scratch
from tierstore.residency.handle import Handle

SHAPE = ModelShape(layers=2, width=64, heads=2, context=64)


@cache
def text() -> Tensor:
    return torch.tensor(list(Path(__file__).read_bytes()), dtype=torch.uint8)


class Decoder(nn.Module):
    """In bfloat16, over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ByteTransformer(SHAPE).bfloat16()

    def forward(self) -> Tensor:
        loss: Tensor = self.inner(*random_batch(text(), 4, SHAPE.context, torch.default_generator))
        return loss


class ReluNet(nn.Module):
    """In float32, over noise: most of what it saves are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(32 * 12 * 12, 10),
        )  # fmt: skip

    def forward(self) -> Tensor:
        return functional.cross_entropy(self.layers(torch.randn(8, 3, 32, 32)), torch.randint(10, (8,)))


@BOTH_WAYS
@pytest.mark.parametrize(("make", "most"), [(Decoder, 0.8), (ReluNet, 0.75)], ids=["decoder", "convolutions"])
def test_training_with_everything_packed_same_bits(
    way: str, make: Callable[[], nn.Module], most: float, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(way, monkeypatch)
    store = make_store(codec="floats")
    assert_same_gradients(training_of(make, list, 6, "AdamW", lr=3e-3), store)
    stats = store.stats()
    assert stats.restored_bytes > 0.9 * stats.spilled_bytes > 0
    assert stats.written_bytes < most * stats.spilled_bytes


def open_file_with(directory: Path, content: bytes) -> Path:
    """A file of a store there, which has no name."""
    for descriptor, target in descriptors_of().items():
        file = Path(f"/proc/self/fd/{descriptor}")
        if target.startswith(f"{directory}/") and file.is_file() and content in file.read_bytes():
            return file
    raise LookupError("not on disk")


def small_tensor() -> Tensor:
    """With zeros that are left out, and exponents that have no code."""
    values = 1 + torch.rand(256)
    values[::3] = 0
    values[1::16] = 100
    return values.bfloat16()


def packed(tensor: Tensor, scratch: Scratch) -> bytes:
    """As it lies on disk."""
    source = memoryview(tensor.view(torch.uint8).numpy())
    length = encode_block(source, scratch.chunk, FLOATS, tensor.itemsize, scratch.workspace)
    assert length < len(source)
    return bytes(scratch.chunk[:length])


def is_refused(store: TierStore, handle: Handle) -> bool:
    try:
        store.get(handle)
    except CorruptDataError:
        return True
    return False


@BOTH_WAYS
@pytest.mark.parametrize("checksum", [True, False])
def test_record_with_any_byte_damaged_is_refused(
    way: str, checksum: bool, make_store: MakeStore, store_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checksum another tensor may come, and nothing worse."""
    use(way, monkeypatch)
    store = make_store(codec="floats", inline_bytes=0, disk_bytes="6MiB", checksum=checksum)
    tensors = [small_tensor() for _ in range(300)]
    scratch = Scratch()
    records = [packed(tensor, scratch) for tensor in tensors]
    assert max(map(len, records)) <= len(records)
    handles = [store.put(tensor.clone()) for tensor in tensors]
    store.flush()
    file = open_file_with(store_directory, records[0])
    written = file.read_bytes()
    with file.open("r+b", buffering=0) as opened:
        for number, record in enumerate(records):
            place = number % len(record)
            os.pwrite(opened.fileno(), bytes([record[place] ^ 1 << number % 8]), written.index(record) + place)
    refused = [is_refused(store, handle) for handle in handles]
    assert all(refused) if checksum else any(refused) and not all(refused)

"""What a record's bytes tell before it is written."""

import random

import pytest
import torch

from tierstore.disk.codec.codec import Codec
from tierstore.disk.codec.probing import content_of, probe
from tierstore.disk.scratch import Scratch
from tierstore.disk.tier import Kind


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())


def kind_of(tensor: torch.Tensor) -> Kind:
    return Kind(str(tensor.dtype).removeprefix("torch."), tensor.element_size())


NORMAL = torch.randn(100_003, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("tensor", "content"),
    [
        (NORMAL, ""),
        (NORMAL.bfloat16(), ""),
        (NORMAL.double(), ""),
        (NORMAL.relu(), "many zeros"),
        (NORMAL.relu().bfloat16(), "many zeros"),
        (torch.zeros(70_000), "all zeros"),
        (torch.zeros(70_000, dtype=torch.bool), "all zeros"),
        (NORMAL > 0, "many zeros"),
        (NORMAL > -2, ""),
        (torch.zeros(70_000, dtype=torch.int64), ""),
        (torch.nn.functional.dropout(NORMAL, 0.1), ""),
        (torch.nn.functional.dropout(NORMAL, 0.4), "many zeros"),
    ],
)
def test_content_is_named_by_its_zeros(tensor: torch.Tensor, content: str) -> None:
    assert content_of(bytes_of(tensor), kind_of(tensor)) == content


def test_content_is_looked_for_all_over_the_record() -> None:
    """Zeros at the front, as of a buffer that fills up, do not stand for the rest."""
    assert content_of(bytes_of(torch.cat([torch.zeros(15_000), NORMAL])), Kind("float32", 4)) == ""
    assert content_of(bytes_of(torch.cat([NORMAL, torch.zeros(200_000)])), Kind("float32", 4)) == "many zeros"


def test_probe_sees_the_whole_record() -> None:
    """Half zeros, half noise: a sample of the middle alone would find either."""
    content = memoryview(bytes(2**20) + random.Random(0).randbytes(2**20))
    found = {sample.codec: sample.encoded_bytes / sample.raw_bytes for sample in probe(content, 2, Scratch())}
    assert found[Codec("zstd", 1)] == pytest.approx(0.5, abs=0.1)

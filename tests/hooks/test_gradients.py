"""Gradients under every kind of budget are those of plain autograd, bit for bit."""

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.programs import (
    MODELS,
    assert_same_gradients,
    program_of,
    training,
)
from tierstore import TierStore

BUDGETS: dict[str, dict[str, object]] = {
    "all to disk": {"host_bytes": 0},
    "small host memory": {"host_bytes": "48KiB"},
    "all in host memory": {"host_bytes": "1GiB"},
    "a byte of each": {"host_bytes": 1, "staging_bytes": 1},
    "tiny staging": {"host_bytes": "20KiB", "staging_bytes": "16KiB"},
    "all in LMDB": {"host_bytes": 0, "inline_bytes": None},
    "nothing in LMDB": {"host_bytes": 0, "inline_bytes": 0},
    "no checksums": {"host_bytes": 0, "checksum": False},
}


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS.keys())
def test_gradients_any_budget_same_bits(make_store: MakeStore, budget: dict[str, object]) -> None:
    store = make_store(**budget)
    for model in MODELS:
        assert_same_gradients(training(model, num_steps=2), store)


@pytest.mark.parametrize("codec", ["none", "auto", "zstd", "zstd:-3", "shuffle-zstd", "shuffle-zstd:4"])
@pytest.mark.parametrize("model", ["convnet", "transformer"])
def test_gradients_any_codec_same_bits(make_store: MakeStore, model: str, codec: str) -> None:
    store = make_store(codec=codec)
    assert_same_gradients(training(model, num_steps=4, optimizer="AdamW"), store)
    assert store.stats().restored_bytes > 0


@pytest.mark.parametrize("prefetch", ["learned", "reverse", "none"])
def test_gradients_any_prefetch_and_threshold_same_bits(store: TierStore, prefetch: str) -> None:
    for lookahead_bytes, min_bytes in ((None, 1), (0, 0), (1, "16KiB"), ("40KiB", 0), ("1GiB", "16KiB")):
        options = {"lookahead_bytes": lookahead_bytes, "min_bytes": min_bytes}
        assert_same_gradients(training("branches"), store, prefetch=prefetch, **options)


@pytest.mark.parametrize("staging_bytes", [0, "64KiB", "1MiB"])
def test_gradients_tensors_larger_than_all_budgets_same_bits(make_store: MakeStore, staging_bytes: object) -> None:
    """Saved tensors of 4 MiB each pass through windows that hold none of them."""
    store = make_store(host_bytes="100KiB", staging_bytes=staging_bytes)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return (weight * 2).sin().exp().tanh().square().mean()

    assert_same_gradients(program_of(loss, (1024, 1024)), store)
    stats = store.stats()
    assert stats.spilled_bytes >= 3 * 4 * 2**20
    assert stats.host_bytes_peak <= 100 * 2**10


def test_gradients_restored_from_disk_not_from_memory(store: TierStore) -> None:
    """What the tests above rely on: with no host memory, and a flush, backward reads what was written."""
    assert_same_gradients(training("transformer", num_steps=1), store)
    stats = store.stats()
    assert stats.spilled_bytes > 100_000
    assert stats.restored_bytes > 0.9 * stats.spilled_bytes
    assert stats.forwarded_bytes == 0


def test_gradients_with_another_default_device_same_bits(make_store: MakeStore) -> None:
    """Programs set one, usually "cuda", and tensors on the CPU are offloaded all the same."""
    with torch.device("meta"):
        store = make_store()
    assert_same_gradients(training("mlp"), store)
    assert store.stats().restored_bytes > 0

"""Gradients under every kind of budget are those of plain autograd, bit for bit."""

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.programs import (
    MODELS,
    SIDE,
    assert_same_bits,
    assert_same_gradients,
    run_offloaded,
    run_plain,
    training,
)
from tierstore import TierStore

BUDGETS: dict[str, dict[str, object]] = {
    "all to disk": {"host_bytes": 0},
    "one byte of host memory": {"host_bytes": 1},
    "small host memory": {"host_bytes": "48KiB"},
    "1MiB of host memory": {"host_bytes": "1MiB"},
    "all in host memory": {"host_bytes": "1GiB"},
    "no staging": {"host_bytes": 0, "staging_bytes": 0},
    "a byte of each": {"host_bytes": 1, "staging_bytes": 1},
    "tiny staging": {"host_bytes": "20KiB", "staging_bytes": "16KiB"},
    "all in LMDB": {"host_bytes": 0, "inline_bytes": None},
    "nothing in LMDB": {"host_bytes": 0, "inline_bytes": 0},
    "no checksums": {"host_bytes": 0, "checksum": False},
}


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS.keys())
@pytest.mark.parametrize("model", MODELS)
def test_gradients_any_budget_same_bits(make_store: MakeStore, model: str, budget: dict[str, object]) -> None:
    assert_same_gradients(training(model, num_steps=2), make_store(**budget))


@pytest.mark.parametrize("codec", ["none", "auto", "zstd", "zstd:-3", "shuffle-zstd", "shuffle-zstd:4"])
@pytest.mark.parametrize("model", ["convnet", "transformer"])
def test_gradients_any_codec_same_bits(make_store: MakeStore, model: str, codec: str) -> None:
    store = make_store(codec=codec)
    assert_same_gradients(training(model, num_steps=4, optimizer="AdamW"), store)
    assert store.stats().restored_bytes > 0


@pytest.mark.parametrize("prefetch", ["learned", "reverse", "none"])
@pytest.mark.parametrize("lookahead_bytes", [None, 0, 1, "40KiB", "1GiB"])
def test_gradients_any_prefetch_same_bits(store: TierStore, prefetch: str, lookahead_bytes: object) -> None:
    assert_same_gradients(training("branches"), store, prefetch=prefetch, lookahead_bytes=lookahead_bytes)


@pytest.mark.parametrize("min_bytes", [1, "16KiB", "32KiB"])
def test_gradients_any_threshold_same_bits(store: TierStore, min_bytes: object) -> None:
    assert_same_gradients(training("mlp"), store, min_bytes=min_bytes)


def test_gradients_everything_below_threshold_nothing_stored(store: TierStore) -> None:
    assert_same_bits(run_offloaded(training("mlp"), store, min_bytes="1GiB"), run_plain(training("mlp")))
    assert store.stats().packed_tensors == 0
    assert store.stats().kept_bytes["small"] > 0


@pytest.mark.parametrize("staging_bytes", [0, "64KiB", "1MiB"])
def test_gradients_tensors_larger_than_all_budgets_same_bits(make_store: MakeStore, staging_bytes: object) -> None:
    """Saved tensors of 4 MiB each pass through windows that hold none of them."""
    store = make_store(host_bytes="100KiB", staging_bytes=staging_bytes)

    def program(around, settle):  # type: ignore[no-untyped-def]
        weight = torch.randn(1024, 1024, requires_grad=True)
        with around():
            loss = (weight * 2).sin().exp().tanh().square().mean()
        settle()
        loss.backward()
        return [loss, weight.grad]

    assert_same_gradients(program, store)
    stats = store.stats()
    assert stats.spilled_bytes >= 3 * 4 * 2**20
    assert stats.host_bytes_peak <= 100 * 2**10


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128])
def test_gradients_any_dtype_same_bits(store: TierStore, dtype: torch.dtype) -> None:
    def program(around, settle):  # type: ignore[no-untyped-def]
        weight = torch.randn(SIDE, SIDE, dtype=dtype, requires_grad=True)
        batch = torch.randn(SIDE, SIDE, dtype=dtype)
        with around():
            loss = ((batch @ weight).tanh() * (weight.conj() + 1) @ batch.T.conj()).exp().abs().sum()
        settle()
        loss.backward()
        return [loss, weight.grad]

    assert_same_gradients(program, store)


def test_gradients_with_nan_and_infinity_same_bits(make_store: MakeStore) -> None:
    def program(around, settle):  # type: ignore[no-untyped-def]
        weight = torch.linspace(-2, 2, SIDE * SIDE).reshape(SIDE, SIDE).requires_grad_()
        with around():
            loss = (weight.log() + (1 / weight.relu()).sqrt() * weight.sqrt()).sum()
        settle()
        loss.backward()
        return [loss, weight.grad]

    for codec in ("none", "shuffle-zstd"):
        assert_same_gradients(program, make_store(codec=codec))


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
    program = training("mlp")
    plain = run_plain(program)
    assert_same_bits(run_offloaded(program, store), plain)
    assert store.stats().restored_bytes > 0

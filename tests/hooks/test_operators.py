"""Every differentiable operator of PyTorch's own database: the same bits with all that is saved on disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo

from tests.census import Census
from tests.hooks.operator_cases import DTYPES, cases_of, differentiable, is_deterministic, run
from tierstore import TierStore

EXCEPTIONS = {
    "linalg_lstsq": "LAPACK rounds by where its workspace lies: plain PyTorch differs from itself",
    "linalg_lstsq_grad_oriented": "LAPACK rounds by where its workspace lies: plain PyTorch differs from itself",
}
"""Operators of which some samples are not compared on the CPU, because plain PyTorch is not deterministic there."""


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory, census: Census) -> Iterator[TierStore]:
    with TierStore(tmp_path_factory.mktemp("drive"), host_bytes=0, disk_bytes="1GiB", codec="none") as store:
        yield store
        stats = store.stats()
        census.count("operator database, saved tensors", "stored", stats.packed_tensors)
        if stats.packed_bytes:  # what is not spilled was asked for too early, or is held by a sample: a small part
            assert stats.spilled_bytes > 0.8 * stats.packed_bytes


def _check(op: OpInfo, device: str, store: TierStore, census: Census) -> None:
    suite = f"operator database on {device}"
    for dtype in DTYPES:
        if dtype not in op.supported_backward_dtypes(device):
            continue
        for case in cases_of(op, device, dtype):
            expected, found = run(case, None), run(case, store)
            if found == expected:
                outcome = "cases bitwise the same" if not isinstance(expected[0], str) else "cases with the same error"
            else:
                excepted = op.formatted_name in EXCEPTIONS if device == "cpu" else not is_deterministic(case, expected)
                assert excepted, f"{case.name}, {dtype}"
                outcome = "cases not compared"
                reason = EXCEPTIONS.get(op.formatted_name, "plain PyTorch differs from itself")
                census.exception(suite, op.formatted_name, reason)
            census.count(suite, outcome)
    assert store.stats().live_handles == 0


@pytest.mark.slow
@pytest.mark.parametrize("op", differentiable(), ids=lambda op: op.formatted_name)
def test_operator_same_bits(op: OpInfo, shared_store: TierStore, census: Census) -> None:
    _check(op, "cpu", shared_store, census)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine")
def test_operators_on_the_device_same_bits(shared_store: TierStore, census: Census) -> None:
    wrong = []
    for op in differentiable():
        try:
            _check(op, "cuda", shared_store, census)
        except AssertionError as error:
            wrong.append(f"{op.formatted_name}: {error}")
    assert not wrong


def test_excepted_operators_exist() -> None:
    assert set(EXCEPTIONS) <= {op.formatted_name for op in differentiable()}

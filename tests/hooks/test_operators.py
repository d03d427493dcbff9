"""Every differentiable operator of PyTorch's own database: the same bits with all that is saved on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo

from tests.census import Census
from tests.hooks.operator_cases import DTYPES, cases_of, differentiable, is_deterministic, run
from tierstore import TierStore

_GELSY = (
    "LAPACK's gelsy reads pivots that torch does not fill, so plain PyTorch differs from itself; compared with "
    "uninitialised memory filled"
)
UNSTEADY = {"linalg_lstsq": _GELSY, "linalg_lstsq_grad_oriented": _GELSY}
"""Operators that plain PyTorch does not repeat from run to run on the CPU, why, and how they are compared."""

REFUSED = {
    "abs": "in place, of complex numbers",
    "float_power": "in place, where the input would need another dtype",
    "native_layer_norm": "differentiated twice without a weight",
    "nn_functional_ctc_loss": "differentiated twice, although its entry says that it can be",
}
"""Operators of which plain PyTorch refuses some case: the same error is expected."""


@contextmanager
def _uninitialised_memory_filled() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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
            if found == expected and not isinstance(expected[0], str):
                outcome = "cases bitwise the same"
            elif found == expected:
                assert device != "cpu" or op.formatted_name in REFUSED, f"{case.name}, {dtype}: {expected[0]}"
                outcome = "cases refused, with the same error"
            else:
                assert device != "cpu", f"{case.name}, {dtype}"
                assert not is_deterministic(case, expected), f"{case.name}, {dtype}"
                outcome = "cases not compared"
                census.exception(suite, op.formatted_name, "plain PyTorch differs from itself")
            census.count(suite, outcome)
    assert store.stats().live_handles == 0


@pytest.mark.slow
@pytest.mark.parametrize("op", differentiable(), ids=lambda op: op.formatted_name)
def test_operator_same_bits(op: OpInfo, shared_store: TierStore, census: Census) -> None:
    if op.formatted_name not in UNSTEADY:
        _check(op, "cpu", shared_store, census)
        return
    census.exception("operator database on cpu", op.formatted_name, UNSTEADY[op.formatted_name])
    with _uninitialised_memory_filled():
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
    assert set(UNSTEADY) | set(REFUSED) <= {op.formatted_name for op in differentiable()}

"""PyTorch's operator database: every differentiable operator, plainly and with everything that it saves on disk.

By default each entry runs a few of its samples, in one dtype. All samples in all dtypes take minutes: `make test-slow`.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import pytest
import torch

from tests.census import Census
from tests.hooks.operator_cases import (
    Verdict,
    backward,
    cases_by_kind,
    compare,
    differentiable_entries,
    dtypes_of,
    plain_outcomes,
)
from tierstore import TierStore

ENTRIES = differentiable_entries()
NUM_FEW = 2
"""Samples of an entry that run by default."""

GELSY = (
    "LAPACK's gelsy reads its pivots, and torch passes it memory that nobody filled: plain runs differ. "
    "Run with uninitialised memory filled"
)
UNSTEADY = {"linalg.lstsq": GELSY, "linalg.lstsq.grad_oriented": GELSY}
"""Entries that plain PyTorch does not repeat from run to run, and why."""

REFUSED = {
    "abs": "abs_ is not for complex tensors",
    "float_power": "float_power_ would have to change the input's dtype",
    "nn.functional.ctc_loss": "no second derivative, although the entry says so",
    "nn.functional.linear_cross_entropy.chunked_none": "no second derivative, although the entry says so",
    "sparse.sampled_addmm": "no second derivative, although the entry says so",
}
"""Entries of which plain PyTorch refuses some case: the same error is expected under the store."""


ABSENT_BEFORE = {"nn.functional.linear_cross_entropy.chunked_none": (2, 13)}
"""Of the entries above, those that older versions of torch have not got, and the version that has."""

KEPT = {
    "istft": "alive elsewhere",  # forward checks its window, and drops the graph of that while it holds the window
    "linalg.svd": "alive elsewhere",  # forward drops the graph of a factor that it has used
    "max_pool2d_with_indices_backward": "alive elsewhere",  # likewise of the pooling, whose input it holds
    "sparse.mm.reduce": "unsupported",
    "sparse.sampled_addmm": "unsupported",
    "svd": "alive elsewhere",  # as "linalg.svd"
    "to_sparse": "unsupported",
}
"""Entries of whose saved tensors some stay where they are, and the reason that `stats()` gives."""


class Totals(NamedTuple):
    packed_bytes: int
    spilled_bytes: int
    kept_bytes: Counter[str]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierStore]:
    """One for all operators, with everything sent to disk."""
    opened = TierStore(tmp_path_factory.mktemp("drive"), host_bytes=0, disk_bytes="4GiB", codec="none")
    yield opened
    opened.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierstore")]


def _totals(store: TierStore) -> Totals:
    stats = store.stats()
    return Totals(stats.packed_bytes, stats.spilled_bytes, Counter(stats.kept_bytes))


def _in_steady_memory(name: str) -> AbstractContextManager[None]:
    return _uninitialised_memory_filled() if name in UNSTEADY else nullcontext()


@contextmanager
def _uninitialised_memory_filled() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("takes_all", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("name", ENTRIES)
def test_operator_everything_saved_on_disk_same_bits(
    name: str, takes_all: bool, store: TierStore, census: Census
) -> None:
    before = _totals(store)
    wrong, refused = [], []
    for dtype in dtypes_of(ENTRIES[name], "cpu")[: None if takes_all else 1]:
        for kind, verdict in _compare_all(name, "cpu", dtype, store, census, None if takes_all else NUM_FEW):
            wrong += [f"{dtype}, {kind}, {difference}" for difference in verdict.differences]
            refused += verdict.refused
    assert not wrong, "\n".join(wrong)
    assert not refused or name in REFUSED, refused
    assert refused or name not in REFUSED or not takes_all, "REFUSED does not say what happens"
    _check_spilled(name, before, _totals(store), census, takes_all)
    _check_idle(store)


def _compare_all(
    name: str, device: str, dtype: torch.dtype, store: TierStore, census: Census, most: int | None = None
) -> Iterator[tuple[str, Verdict]]:
    """`most`: samples of each kind; None: all."""
    suite = f"operators on {device}"
    census.count(suite, f"entries in {str(dtype).removeprefix('torch.')}")
    for kind, cases in cases_by_kind(ENTRIES[name], device, dtype, most).items():
        with _in_steady_memory(name):
            verdict = compare(kind, cases, store)
        census.count(suite, f"samples {kind} bitwise the same", verdict.num_same)
        if verdict.refused:
            census.count(suite, "samples refused with the same error", len(verdict.refused))
            census.exception(suite, name, f"refused by PyTorch: {REFUSED.get(name, verdict.refused[0])}")
        if name in UNSTEADY:
            census.exception(suite, name, UNSTEADY[name])
        yield kind, verdict


def _check_spilled(name: str, before: Totals, after: Totals, census: Census, takes_all: bool) -> None:
    """Everything that was saved went to disk: no leaf was, nothing that is small, nothing that somebody else held."""
    suite = "bytes saved by operators on cpu"
    packed, spilled = after.packed_bytes - before.packed_bytes, after.spilled_bytes - before.spilled_bytes
    census.count(suite, "packed", packed)
    census.count(suite, "spilled", spilled)
    kept = after.kept_bytes - before.kept_bytes
    for reason, num_bytes in kept.items():
        census.count(suite, f"kept ({reason})", num_bytes)
        census.exception(suite, name, f"kept ({reason}) {num_bytes} bytes")
    assert bool(packed) == bool(spilled), f"{packed} bytes packed, {spilled} spilled"
    expected = {KEPT[name]} if name in KEPT else set()
    assert set(kept) == expected if takes_all else set(kept) <= expected, f"kept: {dict(kept)}"


def _check_idle(store: TierStore) -> None:
    stats = store.stats()
    held = stats.live_handles, stats.device_bytes, stats.host_bytes, stats.lent_bytes, stats.disk_bytes
    assert held == (0, 0, 0, 0, 0)


def test_tables_name_entries_of_the_database() -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    absent = {name for name, since in ABSENT_BEFORE.items() if version < since}
    assert (UNSTEADY.keys() | REFUSED.keys() | KEPT.keys()) - absent <= ENTRIES.keys()


def test_unsteady_operators_differ_between_plain_runs(census: Census) -> None:
    """Whether memory that nobody filled shows in a result is chance: what is seen is told, not demanded."""
    for name in UNSTEADY:
        cases = cases_by_kind(ENTRIES[name], "cpu", torch.float32)["forward and backward"]
        expected = plain_outcomes(backward, cases)
        seen = sum(plain_outcomes(backward, cases) != expected for _ in range(8))
        census.count("operators that plain PyTorch does not repeat", f"of 8 runs of {name} differ", seen)
        with _uninitialised_memory_filled():
            expected = plain_outcomes(backward, cases)
            assert all(plain_outcomes(backward, cases) == expected for _ in range(4)), (
                f"{name} differs for another reason"
            )


NUM_PARTS = 16
"""Of the database, each a test: on a device that is not there, so many skips."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine")
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_operators_on_the_device_everything_saved_on_disk_same_bits(
    part: int, store: TierStore, census: Census
) -> None:
    """An operator that plain PyTorch does not repeat on the device (sums by atomic additions) is named, and counted.

    One sample that is seen to differ without the store is enough: whether the others do in a few runs is chance.
    """
    before = _totals(store)
    wrong = []
    for name in list(ENTRIES)[part::NUM_PARTS]:
        differences, num_unsteady = [], 0
        for dtype in dtypes_of(ENTRIES[name], "cuda"):
            for kind, verdict in _compare_all(name, "cuda", dtype, store, census):
                differences += [f"{name}, {dtype}, {kind}, {difference}" for difference in verdict.differences]
                num_unsteady += verdict.num_unsteady
        if num_unsteady:
            census.exception("operators on cuda", name, "plain PyTorch differs between runs")
        else:
            wrong += differences
    assert not wrong, "\n".join(wrong)
    torch.cuda.synchronize()
    assert _totals(store).spilled_bytes > before.spilled_bytes
    _check_idle(store)

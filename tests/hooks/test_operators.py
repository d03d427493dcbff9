"""PyTorch's operator database: every differentiable operator, plainly and with everything that it saves on disk.

By default each entry runs a few of its samples, in one dtype. All samples in all dtypes take minutes: `make test-slow`.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from tests.census import Census
from tests.gpu.device import NEEDS_DEVICE
from tests.hooks.operator_cases import (
    backward,
    cases_by_kind,
    compare,
    differentiable_entries,
    dtypes_of,
    plain_outcomes,
)
from tierstore import StoreStats, TierStore

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
    "linalg.svd": "alive elsewhere",  # forward drops the graph of a factor that it has used
    "sparse.mm.reduce": "unsupported",
    "sparse.sampled_addmm": "unsupported",
    "svd": "alive elsewhere",  # as "linalg.svd"
    "to_sparse": "unsupported",
}
"""Entries of whose saved tensors some stay where they are, and the reason that `stats()` gives."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierStore]:
    """One for all operators, with everything sent to disk."""
    opened = TierStore(tmp_path_factory.mktemp("drive"), host_bytes=0, disk_bytes="4GiB", codec="none")
    yield opened
    opened.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierstore")]


@contextmanager
def _uninitialised_memory_filled() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("device", "takes_all"),
    [
        pytest.param("cpu", False, id="few"),
        pytest.param("cpu", True, id="all", marks=pytest.mark.slow),
        pytest.param("cuda", True, id="device", marks=NEEDS_DEVICE),
    ],
)
@pytest.mark.parametrize("part", range(24))
def test_operators_everything_saved_on_disk_same_bits(
    part: int, device: str, takes_all: bool, store: TierStore, census: Census
) -> None:
    """Each 24th entry of the database: a test for each would take longer than what it tests."""
    wrong = []
    for name in list(ENTRIES)[part::24]:
        before = store.stats()
        wrong += [f"{name}: {each}" for each in _differences(name, device, takes_all, store, census)]
        after = store.stats()
        if device == "cpu":
            wrong += [f"{name}: {each}" for each in _not_spilled(name, before, after, takes_all)]
        held = after.live_handles, after.device_bytes, after.host_bytes, after.lent_bytes, after.disk_bytes
        wrong += [f"{name}: left {held}"] if any(held) else []
    assert not wrong, "\n".join(wrong)
    assert store.stats().spilled_bytes > 0


def _differences(name: str, device: str, takes_all: bool, store: TierStore, census: Census) -> list[str]:
    """From a run without the store.

    An operator that plain PyTorch does not repeat on a device (sums by atomic additions) is named, and counted. One
    sample that is seen to differ without the store is enough: whether the others do in a few runs is chance.
    """
    suite, wrong, refused, num_unsteady = f"operators on {device}", [], [], 0
    for dtype in dtypes_of(ENTRIES[name], device)[: None if takes_all else 1]:
        census.count(suite, f"entries in {str(dtype).removeprefix('torch.')}")
        for kind, cases in cases_by_kind(ENTRIES[name], device, dtype, None if takes_all else NUM_FEW).items():
            with _uninitialised_memory_filled() if name in UNSTEADY else nullcontext():
                verdict = compare(kind, cases, store)
            census.count(suite, f"samples {kind} bitwise the same", verdict.num_same)
            wrong += [f"{dtype}, {kind}, {difference}" for difference in verdict.differences]
            refused += verdict.refused
            num_unsteady += verdict.num_unsteady
    if refused:
        census.exception(suite, name, f"refused by PyTorch: {REFUSED.get(name, refused[0])}")
    if name in UNSTEADY:
        census.exception(suite, name, UNSTEADY[name])
    if device != "cpu":
        if num_unsteady:
            census.exception(suite, name, "plain PyTorch differs between runs")
        return [] if num_unsteady else wrong
    if bool(refused) != (name in REFUSED) and (refused or takes_all):
        wrong.append(f"REFUSED does not say what happens: {refused}")
    return wrong


def _not_spilled(name: str, before: StoreStats, after: StoreStats, takes_all: bool) -> list[str]:
    """What was saved and did not go to disk: no leaf was, nothing that is small, nothing that somebody else held."""
    packed, spilled = after.packed_bytes - before.packed_bytes, after.spilled_bytes - before.spilled_bytes
    kept = {reason for reason in after.kept_bytes if after.kept_bytes[reason] > before.kept_bytes[reason]}
    expected = {KEPT[name]} if name in KEPT else set()
    wrong = [] if bool(packed) == bool(spilled) else [f"{packed} bytes packed, {spilled} spilled"]
    if kept - expected or (takes_all and kept != expected):
        wrong.append(f"kept: {kept}")
    return wrong


def test_tables_name_entries_of_the_database() -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    absent = {name for name, since in ABSENT_BEFORE.items() if version < since}
    assert (UNSTEADY.keys() | REFUSED.keys() | KEPT.keys()) - absent <= ENTRIES.keys()


def test_unsteady_operators_are_steady_where_memory_is_filled() -> None:
    for name in UNSTEADY:
        cases = cases_by_kind(ENTRIES[name], "cpu", torch.float32)["forward and backward"]
        with _uninitialised_memory_filled():
            expected = plain_outcomes(backward, cases)
            assert all(plain_outcomes(backward, cases) == expected for _ in range(4)), name

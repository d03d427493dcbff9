"""What is said where memory did not fall, and to which line of the user's."""

import warnings
from pathlib import Path

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tierstore import TierStore, TierStoreWarning, tiered_offload
from tierstore.base.config import Mode
from tierstore.returning.advice import why_memory_stays

MIB = 2**20


@pytest.mark.parametrize(
    ("away_mib", "free_mib", "mapped_mib", "mode", "is_told"),
    [
        (256, 128, 0, "auto", True),
        (256, 128, 0, "always", True),
        (256, 127, 0, "auto", False),
        (255, 255, 0, "auto", False),
        (4096, 4096, 0, "never", False),
        (4096, None, 0, "auto", False),
        (250, 0, 128, "never", True),
        (257, 0, 128, "never", False),
        (63, 0, 128, "never", False),
    ],
)
def test_told_where_half_of_256_mib_stays_or_the_store_takes_half_as_much_itself(
    away_mib: int, free_mib: int | None, mapped_mib: int, mode: Mode, is_told: bool
) -> None:
    free_bytes = None if free_mib is None else free_mib * MIB
    told = why_memory_stays(away_mib * MIB, free_bytes, mode, "", mapped_mib * MIB)
    assert (told is not None) is is_told
    assert told is None or (f"takes {mapped_mib} MiB to move them" in told) is (mapped_mib > 0)


def test_sentence_offers_always_only_where_that_would_help() -> None:
    short = why_memory_stays(600 * MIB, 500 * MIB, "auto", "") or ""
    assert "600 MiB of saved tensors left memory" in short
    assert "keeps 500 MiB of freed memory" in short
    left_alone = why_memory_stays(600 * MIB, 500 * MIB, "auto", "musl offers no way to return freed memory") or ""
    assert "because musl offers no way to return freed memory." in left_alone
    assert ['return_memory="always"' in short, "return_memory=" in left_alone] == [True, False]
    assert all("docs/how_to/memory_on_cpu.md" in each for each in (short, left_alone))


@pytest.fixture
def talking_store(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> TierStore:
    """A store that has something to say at the end of every scope; what, is tested elsewhere."""
    store = make_store()
    monkeypatch.setattr(inspect(store).returner, "why_memory_stays", lambda away_bytes, mapped_bytes: "memory stays")
    return store


def test_scope_that_ends_with_an_error_is_told_nothing_else(talking_store: TierStore) -> None:
    with pytest.raises(ValueError, match="of the user"), tiered_offload(talking_store):  # a warning would be an error
        raise ValueError("of the user")


def test_warning_that_is_an_error_leaves_the_scope_whole(talking_store: TierStore) -> None:
    scope = tiered_offload(talking_store, min_bytes=1)
    value = torch.ones(1000, requires_grad=True)
    with pytest.raises(TierStoreWarning, match="memory stays"), scope:
        result = value.exp().sum()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    result.backward()
    assert torch.equal(value.grad, torch.ones(1000).exp())


@pytest.mark.usefixtures("no_caching_allocator")
def test_training_whose_buffers_take_what_it_gains_is_told_once(store_directory: Path) -> None:
    value = torch.ones(2**16, requires_grad=True)
    with TierStore(store_directory, host_bytes=0) as store, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        steps_after, steps = 0, 0
        while steps_after < 3 and steps < 100:  # how much the store takes for its reads is for the drive to say
            with tiered_offload(store):
                result = value
                for _ in range(512):  # 128 MiB; as records some 95
                    result = result.sin()
                store.flush()
            result.sum().backward()
            steps_after, steps = steps_after + bool(told), steps + 1
    (only,) = told
    assert "of saved tensors left memory, but the store takes" in str(only.message)
    assert "Give TierStore a smaller staging_bytes." in str(only.message)

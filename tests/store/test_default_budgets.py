"""What a store takes where nothing is given: little, where a training needs the memory for itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cgroups import entering, made_cgroup
from tests.processes import output_of
from tierstore.base.defaults import windows_of

MIB = 2**20
SIZES = st.integers(0, 2**45)


@pytest.mark.parametrize(
    ("available", "host", "staging"),
    [(240, 30, 30), (896, 112, 112), (1000, 164, 112), (1344, 336, 112), (2**14, 2**12, 112), (64, 8, 16), (0, 0, 16)],
)
def test_defaults(available: int, host: int, staging: int) -> None:
    assert windows_of(available * MIB) == (host * MIB, staging * MIB)


@given(SIZES, SIZES)
def test_more_memory_never_leaves_less_for_the_store_or_for_the_training(one: int, other: int) -> None:
    less, more = sorted((one, other))
    before, after = windows_of(less), windows_of(more)
    assert all(map(int.__le__, before, after))
    if less >= 128 * MIB:
        assert sum(before) <= less / 3 + 1
        assert less - sum(before) <= more - sum(after) + 8


@given(SIZES, SIZES)
def test_what_is_given_is_taken(available: int, size: int) -> None:
    assert windows_of(available, size, 5) == (size, 5)
    assert windows_of(available, size)[1] == windows_of(available)[1]
    host, staging = windows_of(available, None, size)
    assert staging == size
    assert available // 8 <= host <= available // 4


def test_training_that_needs_six_tenths_of_a_small_limit_for_itself_is_not_killed() -> None:
    """It saves 512 MiB. A quarter of memory for host and a fixed staging window took more than what was left."""
    program = """
import sys, tempfile, torch
from pathlib import Path
from tierstore import TierStore, tiered_offload
MIB, group = 2**20, Path(sys.argv[1])
weight = torch.ones(MIB, requires_grad=True)
limit = 256 * MIB
(group / "memory.limit_in_bytes").write_text(str(limit + int((group / "memory.usage_in_bytes").read_text())))
with tempfile.TemporaryDirectory() as directory, TierStore(directory) as store:
    needed = torch.ones(limit * 6 // 10 // 4)
    with tiered_offload(store):
        hidden = weight
        for _ in range(128):
            hidden = hidden.sin()
    hidden.sum().backward()
    print(store.stats().spilled_bytes > 300 * MIB, needed.min().item() == 1)
"""
    with made_cgroup("memory") as cgroup:
        assert output_of(program, cgroup, before=entering(cgroup)) == "True True\n"

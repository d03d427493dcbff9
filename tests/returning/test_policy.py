"""When freed memory is returned: plain values in, decisions out."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.base.config import Mode
from tierstore.returning.policy import ReturnPolicy
from tierstore.returning.room import Room, reserve_of

MIB, GIB = 2**20, 2**30
LIMIT = 4 * GIB
RESERVE = 256 * MIB
AMPLE, SHORT, NEARLY_USED_UP = (Room(LIMIT, left_bytes) for left_bytes in (GIB, 200 * MIB, 40 * MIB))

Asked = tuple[float, int, Room, bool]
"""At what time, with how much resident and left, and whether memory is to be returned then."""


@pytest.mark.parametrize(
    ("limit_bytes", "reserve_bytes"), [(128 * MIB, 32 * MIB), (LIMIT, RESERVE), (512 * GIB, GIB), (0, 32 * MIB)]
)
def test_reserve_is_a_sixteenth_within_bounds(limit_bytes: int, reserve_bytes: int) -> None:
    assert reserve_of(limit_bytes) == reserve_bytes


@given(st.lists(st.integers(0, 64 * GIB), max_size=20), st.integers(RESERVE, 2 * LIMIT))
def test_auto_never_returns_while_room_is_ample(sizes: list[int], left_bytes: int) -> None:
    policy = ReturnPolicy("auto")
    assert not any(policy.is_due(now, size, Room(LIMIT, left_bytes)) for now, size in enumerate(sizes))


@given(st.integers(0, RESERVE - 1))
def test_auto_returns_again_after_a_quarter_of_what_is_left(left_bytes: int) -> None:
    policy = ReturnPolicy("auto")
    policy.returned(0.0, 0.0, GIB)
    step = max(left_bytes // 4, 4 * MIB)
    assert not policy.is_due(1.0, GIB + step - 1, Room(LIMIT, left_bytes))
    assert policy.is_due(1.0, GIB + step, Room(LIMIT, left_bytes))


@pytest.mark.parametrize(
    ("mode", "returned", "asked"),
    [
        ("auto", None, [(0.0, GIB, Room(LIMIT, RESERVE), False), (0.0, GIB, Room(LIMIT, RESERVE - 1), True)]),
        ("auto", (0.0, 0.0), [(1.0, GIB - 100 * MIB, SHORT, False), (2.0, GIB - 50 * MIB, SHORT, True)]),
        ("auto", (0.0, 0.0), [(1.0, GIB, SHORT, False), (2.0, GIB, Room(LIMIT, 150 * MIB), True)]),
        ("auto", (10.0, 0.5), [(11.99, 2 * GIB, SHORT, False), (12.0, 2 * GIB, SHORT, True)]),
        ("always", (10.0, 0.5), [(11.99, 2 * GIB, SHORT, False), (12.0, 2 * GIB, SHORT, True)]),
        ("auto", (10.0, 60.0), [(10.01, 2 * GIB, SHORT, False), (10.01, 2 * GIB, NEARLY_USED_UP, True)]),
        ("always", None, [(0.0, GIB, AMPLE, False), (1.0, GIB + 32 * MIB - 1, AMPLE, False)]),
        ("always", None, [(0.0, GIB, AMPLE, False), (1.0, GIB + 32 * MIB, AMPLE, True)]),
        ("always", (0.0, 1.0), [(3.9, 2 * GIB, AMPLE, False), (4.0, 2 * GIB, AMPLE, True)]),
    ],
    ids=[
        "as soon as less than the reserve is left",
        "growth counts from the least since the last return",
        "what others take is a step too",
        "a rest four times as long as the return",
        "always rests too",
        "no rest where the reserve is nearly used up",
        "always: not before 32 MiB, nor before it knows what was",
        "always: after 32 MiB whatever is left",
        "always rests with ample room too",
    ],
)
def test_memory_is_returned_when(mode: Mode, returned: tuple[float, float] | None, asked: Sequence[Asked]) -> None:
    policy = ReturnPolicy(mode)
    if returned is not None:
        policy.returned(*returned, GIB)
    assert [policy.is_due(now, resident, room) for now, resident, room, _ in asked] == [each[-1] for each in asked]


@given(st.integers(0, 2**42), st.integers(0, 2**42))
def test_auto_looks_again_before_fresh_pages_can_reach_the_reserve(limit_bytes: int, left_bytes: int) -> None:
    seconds = ReturnPolicy("auto").seconds_to_next_look(Room(limit_bytes, left_bytes))
    assert 0.002 <= seconds <= 0.25
    assert seconds == 0.002 or seconds * 8 * GIB <= left_bytes - reserve_of(limit_bytes)

"""When freed memory is returned: plain values in, decisions out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.base.config import Mode
from tierstore.returning.policy import ReturnPolicy
from tierstore.returning.room import Room, reserve_of

MIB, GIB = 2**20, 2**30
LIMIT = 4 * GIB  # the reserve is 256 MiB
AMPLE, SHORT = Room(LIMIT, GIB), Room(LIMIT, 200 * MIB)
NEARLY_USED_UP = Room(LIMIT, 40 * MIB)


def returned_at(now: float, seconds: float, resident_bytes: int, mode: Mode = "auto") -> ReturnPolicy:
    policy = ReturnPolicy(mode)
    policy.returned(now, seconds, resident_bytes)
    return policy


@pytest.mark.parametrize(
    ("limit_bytes", "reserve_bytes"), [(128 * MIB, 32 * MIB), (4 * GIB, 256 * MIB), (512 * GIB, GIB), (0, 32 * MIB)]
)
def test_reserve_is_a_sixteenth_within_bounds(limit_bytes: int, reserve_bytes: int) -> None:
    assert reserve_of(limit_bytes) == reserve_bytes


@given(st.lists(st.integers(0, 64 * GIB), max_size=20), st.integers(reserve_of(LIMIT), 2 * LIMIT))
def test_auto_never_returns_while_room_is_ample(sizes: list[int], left_bytes: int) -> None:
    policy = ReturnPolicy("auto")
    assert not any(policy.is_due(now, size, Room(LIMIT, left_bytes)) for now, size in enumerate(sizes))


def test_auto_returns_as_soon_as_less_than_the_reserve_is_left() -> None:
    policy = ReturnPolicy("auto")
    assert not policy.is_due(0.0, GIB, Room(LIMIT, reserve_of(LIMIT)))
    assert policy.is_due(0.0, GIB, Room(LIMIT, reserve_of(LIMIT) - 1))


@given(st.integers(0, reserve_of(LIMIT) - 1))
def test_auto_returns_again_after_a_quarter_of_what_is_left(left_bytes: int) -> None:
    policy = returned_at(0.0, 0.0, GIB)
    step = max(left_bytes // 4, 4 * MIB)
    assert not policy.is_due(1.0, GIB + step - 1, Room(LIMIT, left_bytes))
    assert policy.is_due(1.0, GIB + step, Room(LIMIT, left_bytes))


def test_growth_is_counted_from_the_least_since_the_last_return() -> None:
    policy = returned_at(0.0, 0.0, GIB)
    assert not policy.is_due(1.0, GIB - 100 * MIB, SHORT)
    assert policy.is_due(2.0, GIB - 50 * MIB, SHORT)


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_return_that_took_long_is_followed_by_rest_four_times_as_long(mode: Mode) -> None:
    policy = returned_at(10.0, 0.5, GIB, mode)
    assert not policy.is_due(11.99, 2 * GIB, SHORT)
    assert policy.is_due(12.0, 2 * GIB, SHORT)


def test_no_rest_where_the_reserve_is_nearly_used_up() -> None:
    policy = returned_at(10.0, 60.0, GIB)
    assert not policy.is_due(10.01, 2 * GIB, SHORT)
    assert policy.is_due(10.01, 2 * GIB, NEARLY_USED_UP)


def test_always_returns_after_32_mib_of_growth_whatever_is_left_and_rests_too() -> None:
    policy = ReturnPolicy("always")
    assert not policy.is_due(0.0, GIB, AMPLE)  # it does not know yet what was before
    assert not policy.is_due(1.0, GIB + 32 * MIB - 1, AMPLE)
    assert policy.is_due(2.0, GIB + 32 * MIB, AMPLE)
    policy.returned(3.0, 0.0, GIB + 10 * MIB)
    assert not policy.is_due(4.0, GIB + 41 * MIB, AMPLE)
    assert policy.is_due(5.0, GIB + 42 * MIB, AMPLE)
    policy = returned_at(0.0, 1.0, GIB, "always")
    assert not policy.is_due(3.9, 2 * GIB, AMPLE)
    assert policy.is_due(4.0, 2 * GIB, AMPLE)


@given(st.integers(0, 2**42), st.integers(0, 2**42))
def test_auto_looks_again_before_fresh_pages_can_reach_the_reserve(limit_bytes: int, left_bytes: int) -> None:
    room = Room(limit_bytes, left_bytes)
    seconds = ReturnPolicy("auto").seconds_to_next_look(room)
    assert 0.002 <= seconds <= 0.25
    spare_bytes = left_bytes - reserve_of(limit_bytes)
    assert seconds == 0.002 or seconds * 8 * GIB <= spare_bytes


def test_auto_looks_seldom_with_much_room_and_always_looks_often() -> None:
    assert ReturnPolicy("auto").seconds_to_next_look(Room(64 * GIB, 32 * GIB)) == 0.25
    assert ReturnPolicy("auto").seconds_to_next_look(SHORT) == 0.002
    assert ReturnPolicy("always").seconds_to_next_look(Room(64 * GIB, 32 * GIB)) == 0.004
    assert ReturnPolicy("always").seconds_to_next_look(SHORT) == 0.002


def test_short_memory_that_others_take_is_a_step_too() -> None:
    policy = returned_at(0.0, 0.0, GIB)
    left_bytes = reserve_of(LIMIT) - 1
    assert not policy.is_due(1.0, GIB, Room(LIMIT, left_bytes))
    assert policy.is_due(2.0, GIB, Room(LIMIT, left_bytes - left_bytes // 4))

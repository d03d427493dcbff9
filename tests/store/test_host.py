"""The three windows of host memory, against sums done by hand."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tierstore.ledger.windows import HostWindows


def _record(nbytes: int) -> Any:
    return SimpleNamespace(nbytes=nbytes, window=None, charged_bytes=0)


def test_move_larger_than_the_staging_begins_only_alone() -> None:
    books = HostWindows(0, 50)
    assert books.admits_move(500)
    books.charge(_record(1), books.staging)
    assert not books.admits_move(500)
    assert books.admits_move(49)
    assert not books.admits_move(50)


def test_prefetch_takes_staging_then_host_and_never_overdraws() -> None:
    books = HostWindows(20, 10)
    assert books.window_for_prefetch(10) is books.staging
    assert books.window_for_prefetch(20) is books.host
    assert books.window_for_prefetch(21) is None
    assert HostWindows(0, 0).window_for_prefetch(1) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["host", "staging", None]), st.integers(0, 99))))
def test_any_sequence_of_charges_adds_up(charges: list[tuple[int, str | None, int]]) -> None:
    books, records = HostWindows(100, 100), [_record(5 * i) for i in range(5)]
    for number, name, nbytes in charges:
        records[number].nbytes = nbytes
        books.charge(records[number], None if name is None else getattr(books, name))
        for window in (books.host, books.staging, books.outstanding):
            charged = [record.charged_bytes for record in records if record.window is window]
            assert window.used_bytes == sum(charged)


def test_staging_takes_from_host_what_several_of_the_largest_need() -> None:
    books = HostWindows(160, 15, grows=True)
    books.charge(_record(10), books.host)
    books.grow_staging(3)
    assert books.limits == (135, 40)
    assert (books.host.limit_bytes, books.staging.limit_bytes) == (135, 40)
    books.grow_staging(20)  # at most a quarter, and none of that for a part of a tensor
    assert books.limits == (135, 40)
    books.grow_staging(18)
    assert books.limits == (121, 54)
    for other in (HostWindows(160, 15), HostWindows(0, 15, grows=True), HostWindows(16, 10, grows=True)):
        other.grow_staging(10)
        assert other.limits == (other.host_bytes, other.staging.limit_bytes)
        assert other.host.limit_bytes == other.host_bytes


def test_what_staging_took_counts_for_what_is_new_only_as_host_lets_go_of_it() -> None:
    books, records = HostWindows(160, 15, grows=True), [_record(10) for _ in range(16)]
    for record in records:
        books.charge(record, books.host)
    books.grow_staging(10)
    assert (books.limits, books.excess_bytes) == ((135, 40), 25)
    for record in records[:2]:
        assert books.admits_move(10, from_host=True)
        books.charge(record, books.staging)
    assert (books.used_bytes, books.excess_bytes) == ((145, 15), 5)
    assert books.window_for_prefetch(15) is books.staging
    assert books.window_for_prefetch(16) is None
    assert books.admits_move(15)
    assert not books.admits_move(16)
    assert books.admits_move(20, from_host=True)


_MOVES = st.tuples(st.integers(0, 5), st.sampled_from(["admit", "send", "read", "free"]))


@given(st.integers(0, 200), st.integers(0, 60), st.lists(st.integers(1, 60), min_size=6), st.lists(_MOVES))
def test_whatever_staging_has_taken_all_is_held_within_the_promise(
    host_bytes: int, staging_bytes: int, sizes: list[int], moves: list[tuple[int, str]]
) -> None:
    books, records = HostWindows(host_bytes, staging_bytes, grows=True), [_record(size) for size in sizes]
    for number, move in moves:
        record = records[number]
        if move == "free":
            books.charge(record, None)
        elif move == "send" and record.window is books.host and books.admits_move(record.nbytes, from_host=True):
            books.charge(record, books.staging)
        elif move == "admit" and record.window is None:
            if not books.host.fits(record.nbytes):
                books.grow_staging(record.nbytes)
            if books.host.fits(record.nbytes):
                books.charge(record, books.host)
            elif books.admits_move(record.nbytes):
                books.charge(record, books.staging)
        elif move == "read" and record.window is None:
            books.charge(record, books.window_for_prefetch(record.nbytes))
        in_host, beside = books.used_bytes
        assert in_host + beside == books.host.used_bytes + books.staging.used_bytes
        assert in_host <= books.host_bytes_peak <= host_bytes
        assert beside <= max(staging_bytes, *sizes)
        assert in_host + beside <= host_bytes + max(staging_bytes, *sizes)

"""The three windows of host memory, against sums done by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tierstore.host import HostBooks, Window


def _record(nbytes: int) -> Any:
    return SimpleNamespace(nbytes=nbytes, window=None, charged_bytes=0)


def test_window_fits_up_to_its_limit_exactly() -> None:
    window = Window(10)
    assert window.fits(10)
    assert not window.fits(11)
    window.charge(7)
    assert window.fits(3)
    assert not window.fits(4)
    window.discharge(7)
    assert (window.used_bytes, window.peak_bytes) == (0, 7)


def test_window_without_limit_fits_anything() -> None:
    assert Window(None).fits(2**70)


def test_charge_moves_with_the_record_and_remembers_its_size() -> None:
    books, record = HostBooks(100, 50), _record(30)
    books.charge(record, books.host)
    record.nbytes = 10  # only a part of the storage is stored
    assert books.host.used_bytes == 30
    books.charge(record, books.staging)
    assert (books.host.used_bytes, books.staging.used_bytes) == (0, 10)
    books.charge(record, books.staging, 12)
    assert books.staging.used_bytes == 12
    books.charge(record, None)
    books.charge(record, None)
    assert (books.host.used_bytes, books.staging.used_bytes, books.lent.used_bytes) == (0, 0, 0)


def test_move_larger_than_the_staging_begins_only_alone() -> None:
    books = HostBooks(0, 50)
    assert books.admits_move(500)
    books.charge(_record(1), books.staging)
    assert not books.admits_move(500)
    assert books.admits_move(49)
    assert not books.admits_move(50)


def test_move_with_no_staging_at_all_begins_alone() -> None:
    books = HostBooks(0, 0)
    assert books.admits_move(1)
    books.charge(_record(1), books.staging)
    assert not books.admits_move(1)


def test_prefetch_takes_staging_then_host_and_never_overdraws() -> None:
    books = HostBooks(20, 10)
    assert books.window_for_prefetch(10) is books.staging
    assert books.window_for_prefetch(20) is books.host
    assert books.window_for_prefetch(21) is None
    assert HostBooks(0, 0).window_for_prefetch(1) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["host", "staging", None]), st.integers(0, 99))))
def test_any_sequence_of_charges_adds_up(charges: list[tuple[int, str | None, int]]) -> None:
    books, records = HostBooks(100, 100), [_record(5 * i) for i in range(5)]
    peak = 0
    for number, name, nbytes in charges:
        records[number].nbytes = nbytes
        books.charge(records[number], None if name is None else getattr(books, name))
        for window in (books.host, books.staging, books.lent):
            charged = [record.charged_bytes for record in records if record.window is window]
            assert window.used_bytes == sum(charged)
        peak = max(peak, books.host.used_bytes)
        assert books.host.peak_bytes == peak

"""What is to be moved, as the worker takes it: what is urgent first, and nothing that was withdrawn."""

from typing import Any, NamedTuple

from tierstore.ledger.jobs import Jobs, Room
from tierstore.ledger.windows import SMALL_BYTES


class _Record(NamedTuple):
    key: int
    nbytes: int


def _record(key: int, nbytes: int = 2 * SMALL_BYTES) -> Any:
    return _Record(key, nbytes)


def _writes(jobs: Jobs[Any]) -> list[int]:
    return [record.key for record in jobs.take(Room(9999, 0, 0))[1]]


def _reads(jobs: Jobs[Any]) -> list[int]:
    return [record.key for record in jobs.take(Room(0, 9999, 0))[0]]


def _discards(jobs: Jobs[Any]) -> list[int]:
    return jobs.take(Room(0, 0, 1))[2]


def test_worker_is_told_only_of_what_it_has_room_for() -> None:
    jobs = Jobs[Any]()
    for key in range(3):
        jobs.write(_record(key))
    assert jobs.has_news
    assert [len(taken) for taken in jobs.take(Room(2, 1, 1))] == [0, 2, 0]
    jobs.write(_record(3))
    assert not jobs.has_news, "it looks again when a write ends"
    jobs.read(_record(4), demanded=False)
    assert jobs.has_news
    assert [len(taken) for taken in jobs.take(Room(1, 1, 1))] == [1, 1, 0]
    jobs.read(_record(5), demanded=True)
    assert not jobs.has_news


def test_discards_wait_for_a_turn_that_comes_anyway() -> None:
    jobs = Jobs[Any]()
    jobs.running.add(_record(1))
    jobs.discard(2)
    assert not jobs.has_news
    jobs.running.clear()
    jobs.discard(3)
    assert jobs.has_news
    assert _discards(jobs) == [2, 3]
    assert jobs.num_discards == 2, "they run"


def test_small_writes_wait_for_company_or_for_somebody_who_waits() -> None:
    """NOTE [Small writes wait] in `tierstore/ledger/jobs.py`."""
    jobs = Jobs[Any]()
    small = [_record(key, 100) for key in range(5000)]
    for record in small[:10]:
        jobs.write(record)
    assert not jobs.has_news
    jobs.write(_record(4999))
    assert jobs.has_news
    assert _writes(jobs) == [4999], "others do not take them along"
    jobs.withdraw_write(small[3])
    jobs.hurry()
    assert _writes(jobs) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    jobs.has_news = False
    for record in small[10:4990]:
        jobs.write(record)
        jobs.withdraw_write(record)
    assert not jobs.has_news, "those that were withdrawn are no company"
    for record in small[10:4990]:
        jobs.write(record)
    assert jobs.has_news
    assert _writes(jobs)[:2000] == list(range(10, 2010))


def test_small_writes_are_company_by_their_bytes_too() -> None:
    jobs = Jobs[Any]()
    for key in range(2**20 // SMALL_BYTES):
        jobs.write(_record(key, SMALL_BYTES))
    assert not jobs.has_news
    jobs.write(_record(999, SMALL_BYTES))
    assert jobs.has_news


def test_closed_store_begins_nothing_more() -> None:
    jobs = Jobs[Any]()
    jobs.write(_record(1))
    jobs.write(_record(2, 1))
    jobs.read(_record(3), demanded=True)
    jobs.read(_record(4), demanded=False)
    jobs.discard(5)
    jobs.clear()
    jobs.hurry()
    assert (_writes(jobs), _reads(jobs), _discards(jobs)) == ([], [], [])

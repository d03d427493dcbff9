"""Turns: so many jobs at once, each with working memory of its own, used again by the next."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from tierstore.disk.scratch import Scratch, ScratchPool, ScratchTurns


def test_whoever_comes_when_all_turns_are_taken_waits_for_one() -> None:
    pool = ScratchPool(2)
    has_third = Event()

    def third() -> Scratch:
        with pool.lend() as scratch:
            has_third.set()
            return scratch

    with ThreadPoolExecutor(1) as executor, pool.lend() as first:
        with pool.lend() as second:
            assert first is not second
            assert pool.num_lent == 2
            waiting = executor.submit(third)
            assert not has_third.wait(0.05)
        assert waiting.result(20) is second
    assert pool.num_lent == 0


def test_turn_of_a_job_that_fails_comes_back() -> None:
    pool = ScratchPool(1)
    for _ in range(3):
        with pytest.raises(OSError, match="broken"), pool.lend():
            raise OSError("broken")
    assert pool.num_lent == 0


def test_reads_have_turns_of_their_own() -> None:
    turns = ScratchTurns(1)
    with turns.writes.lend(), turns.reads.lend():
        assert turns.num_taken == 2

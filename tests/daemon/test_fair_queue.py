"""Fair shares of what is moved, whatever the sizes; and who begins when, with restores first."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from tierstore.daemon.fair_queue import FairQueue
from tierstore.daemon.lanes import Lanes
from tierstore.daemon.server import Daemon
from tierstore.daemon.sessions import Session, new_lease
from tierstore.daemon.settings import ServeSettings
from tierstore.disk.local import LocalDisk


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1000)), max_size=60))
def test_everything_comes_out_once_and_in_order_within_an_owner(pushes: list[tuple[int, int]]) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for number, (owner, cost) in enumerate(pushes):
        queue.push(owner, cost, (owner, number))
    popped = [queue.pop() for _ in range(len(queue))]
    assert sorted(popped, key=lambda item: item[1]) == [(owner, number) for number, (owner, _) in enumerate(pushes)]
    for owner in range(4):
        numbers = [number for each, number in popped if each == owner]
        assert numbers == sorted(numbers)
    with pytest.raises(IndexError):
        queue.pop()


@given(st.integers(1, 50), st.integers(1, 50))
def test_shares_are_equal_in_bytes_not_in_requests(small: int, large: int) -> None:
    queue: FairQueue[int] = FairQueue()
    costs = (small, large)
    for owner, cost in enumerate(costs):
        for _ in range(200):
            queue.push(owner, cost, owner)
    served = Counter[int]()
    while all(served[owner] < 150 * costs[owner] for owner in range(2)):
        owner = queue.pop()
        served[owner] += costs[owner]
        assert abs(served[0] - served[1]) <= 2 * max(costs)


def test_who_was_idle_gets_no_credit_for_it() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push(1, 10, "late")
    queue.pop()
    for _ in range(100):
        queue.push(2, 10, "busy")
        queue.pop()
    for _ in range(4):
        queue.push(1, 10, "late")
        queue.push(2, 10, "busy")
    order = [queue.pop() for _ in range(8)]
    assert order.count("late") == 4
    assert order[:4].count("busy") >= 1, "one second of idling is not worth a hundred turns"


def test_forget_leaves_the_others() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push(1, 10, "a")
    queue.push(2, 10, "b")
    queue.push(1, 10, "c")
    assert queue.forget(1) == ["a", "c"]
    assert queue.forget(1) == []
    assert [queue.pop() for _ in range(len(queue))] == ["b"]
    assert queue.num_owners == 1


def test_session_that_ends_is_forgotten_by_the_lanes(tmp_path: Path) -> None:
    """A daemon that runs for months has many sessions, and looks at all it remembers for each turn."""

    async def test(executor: ThreadPoolExecutor) -> None:
        daemon = Daemon(ServeSettings(tmp_path))
        options = {"disk_bytes": 2**20, "inline_bytes": 0, "codec": "none", "checksum": True}
        daemon.disk = LocalDisk(tmp_path, executor=executor, **options)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tasks:

            def start(work: Coroutine[Any, Any, None]) -> None:
                tasks.create_task(work)

            daemon.lanes = Lanes(start, 1)
            daemon.lanes.read(7, 10, lambda: asyncio.sleep(0))
            daemon.lanes.write(7, 10, lambda: asyncio.sleep(0))
        lease, _ = new_lease(7, 0, "one", None, 1)
        daemon.sessions[7] = Session(lease, 100, None)
        await daemon.end_session(daemon.sessions[7], "a test")
        await daemon.disk.close()
        assert daemon.lanes.reads.queue.num_owners == daemon.lanes.writes.queue.num_owners == 0

    with ThreadPoolExecutor(2) as executor:
        asyncio.run(test(executor))


def test_lanes_run_so_many_at_once_and_no_write_while_a_read_waits() -> None:
    async def test() -> None:
        running, most, begun = Counter[str](), Counter[str](), list[str]()
        doors: dict[str, asyncio.Event] = {}

        async def job(name: str) -> None:
            kind = name[0]
            begun.append(name)
            running[kind] += 1
            most[kind] = max(most[kind], running[kind])
            await doors.setdefault(name, asyncio.Event()).wait()
            running[kind] -= 1

        async def turn() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:

            def start(work: Coroutine[Any, Any, None]) -> None:
                tasks.create_task(work)

            lanes = Lanes(start, 2)
            for number in range(3):
                lanes.read(1, 10, lambda number=number: job(f"r{number}"))
            for number in range(3):
                lanes.write(1, 10, lambda number=number: job(f"w{number}"))
            await turn()
            assert begun == ["r0", "r1"], "r2 waits, so no write begins"
            assert lanes.num_queued == 4
            doors["r0"].set()
            await turn()
            assert begun == ["r0", "r1", "r2", "w0", "w1"]
            for name in ("r1", "r2", "w0", "w1"):
                doors[name].set()
            await turn()
            doors["w2"].set()
        assert most == {"r": 2, "w": 2}
        assert begun[-1] == "w2"

    uvloop.run(test())

"""Fair shares of what is served, whatever the sizes; and who begins when, with restores first but not alone."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.daemon.lanes import JOB_BYTES, FairQueue, Job, Lanes
from tierstore.daemon.options import ServeSettings
from tierstore.daemon.registry import Registry
from tierstore.daemon.sessions import RecordCount, Session, new_lease
from tierstore.daemon.tasks import Stage, Tasks
from tierstore.disk.local import LocalDisk

PART_BYTES = 8 * 2**20
MOST_BEGUN = 5000  # an endless one ends then


@settings(deadline=None)
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


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 50))
def test_shares_are_equal_in_cost_not_in_items(small: int, large: int) -> None:
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
    assert "busy" in [queue.pop() for _ in range(4)], "idling is not worth a hundred turns"


@settings(deadline=None)
@given(st.integers(2, 30), st.integers(1, 100), st.integers(1, 100))
def test_users_get_the_same_share_however_many_sessions_they_have(num_sessions: int, small: int, large: int) -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(200):
        queue.push(0, small, "one", uid=1)
    for number in range(200 * num_sessions):
        queue.push(1 + number % num_sessions, large, "crowd", uid=2)
    served, costs = Counter[str](), {"one": small, "crowd": large}
    while max(served.values(), default=0) < 150 * min(small, large):
        found = queue.pop()
        assert found is not None
        served[found] += costs[found]
        assert abs(served["one"] - served["crowd"]) <= 2 * max(small, large)


def test_sessions_of_a_user_take_turns() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(12):
        queue.push(number % 3, 10, number % 3, uid=1)
        queue.push(7, 10, 7, uid=2)
    assert [queue.pop() for _ in range(12)][::2] == [0, 1, 2, 0, 1, 2]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1000)), max_size=60), st.integers(0, 5))
def test_what_is_dropped_is_that_of_one_session_and_all_of_it(pushes: list[tuple[int, int]], gone: int) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for number, (session, cost) in enumerate(pushes):
        queue.push(session, cost, (session, number), uid=session % 2)
    items = [(session, number) for number, (session, _) in enumerate(pushes)]
    assert queue.drop(gone) == [each for each in items if each[0] == gone]
    left = [queue.pop() for _ in range(len(queue))]
    assert sorted(left) == sorted(each for each in items if each[0] != gone)  # type: ignore[type-var]
    assert queue.pop() is None
    for session in range(6):
        queue.remove_session(session)
    assert queue._lines == queue._users == {}


async def test_session_that_ends_is_forgotten_by_the_lanes(tmp_path: Path) -> None:
    """A daemon that runs for months has many sessions, and looks at all it remembers for each turn."""
    with ThreadPoolExecutor(2) as executor:
        options = {"disk_bytes": 2**20, "inline_bytes": 0, "codec": "none", "checksum": True}
        disk = LocalDisk(tmp_path, executor=executor, **options)  # type: ignore[arg-type]
        tasks = Tasks(after_each=lambda: None)
        lanes = Lanes(tasks.start, 1)
        registry = Registry(disk, lanes, tasks, Stage(), ServeSettings((tmp_path,)))
        async with asyncio.TaskGroup() as group:
            tasks.group = group
            lanes.read(7, 10, lambda: asyncio.sleep(0))
            lanes.write(7, 10, lambda: asyncio.sleep(0))
        lease, _ = new_lease(7, 0, "one", None, 1)
        registry.sessions[7] = Session(lease, 100, None, RecordCount(100), disk)
        await registry.end(registry.sessions[7], "a test")
        await disk.close()
    assert lanes.reads.queue._lines == lanes.writes.queue._lines == {}


class _Drive:
    """Lanes whose jobs are named by their session, and a number if they have one, and end when their door is open."""

    def __init__(self, tasks: asyncio.TaskGroup, *numbers: int) -> None:
        self.lanes = Lanes(tasks.create_task, *numbers)
        self.doors = defaultdict[str, asyncio.Event](asyncio.Event)
        self.running, self.most = Counter[str](), Counter[str]()
        self._begun: list[str] = []

    def ask(self, way: str, *names: str, uid: int = 0) -> None:
        """For a job of each."""
        for name in names:
            do, dropped = partial(self._job, way, name), partial(self._begun.append, f"no {name}")
            getattr(self.lanes, way)(int(name.split(".")[0]), 10, do, dropped, uid=uid)

    async def begun(self) -> str:
        """Those that have begun by now."""
        for _ in range(9):
            await asyncio.sleep(0)
        return " ".join(self._begun)

    def open(self, *names: str) -> None:
        for name in names or list(self.doors):
            self.doors[name].set()

    async def _job(self, way: str, name: str) -> None:
        self._begun.append(name)
        self.running[way] += 1
        self.most[way] = max(self.most[way], self.running[way])
        await self.doors[name].wait()
        self.running[way] -= 1


async def test_lanes_run_so_many_at_once_and_one_write_while_a_read_waits() -> None:
    async with asyncio.TaskGroup() as tasks:
        drive = _Drive(tasks, 2)
        drive.ask("read", "1.0", "1.1", "1.2")
        drive.ask("write", "1.3", "1.4", "1.5")
        assert await drive.begun() == "1.0 1.1 1.3", "1.2 waits, so no other write begins"
        assert (len(drive.lanes.reads.queue), len(drive.lanes.writes.queue)) == (1, 2)
        drive.open("1.0")
        assert await drive.begun() == "1.0 1.1 1.3 1.2 1.4"
        drive.open()
        assert await drive.begun() == "1.0 1.1 1.3 1.2 1.4 1.5"
        drive.open()
    assert drive.most == {"read": 2, "write": 2}


@pytest.mark.parametrize("way", ["read", "write"])
async def test_one_place_is_left_for_others_whatever_a_session_has_queued(way: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        drive = _Drive(tasks, 2)
        drive.ask(way, "1", "1", "1", "1", "2", "3")
        assert await drive.begun() == "1 1 2", "as many of one as keep the drive busy, and one more"
        drive.open("2")
        assert await drive.begun() == "1 1 2 3", "the place that is free again is not the first one's either"
        drive.open()
    assert await drive.begun() == "1 1 2 3 1 1"


@pytest.mark.parametrize("way", ["read", "write"])
async def test_one_place_is_left_for_other_users_however_many_sessions_one_has(way: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        drive = _Drive(tasks, 2)
        drive.ask(way, *map(str, range(10)), uid=1)
        assert await drive.begun() == "0 1 2"
        drive.ask(way, "99", uid=2)
        assert await drive.begun() == "0 1 2 99"
        drive.open(*map(str, range(10)), "99")
    assert sorted(map(int, (await drive.begun()).split())) == [*range(10), 99]


async def test_writes_that_wait_for_reads_begin_when_those_are_dropped() -> None:
    async with asyncio.TaskGroup() as tasks:
        drive = _Drive(tasks, 1)
        drive.ask("read", "1.0", "1.1")
        drive.ask("write", "1.2", "2")
        assert await drive.begun() == "1.0 1.2"
        for dropped in drive.lanes.drop(1):
            dropped()
        assert await drive.begun() == "1.0 1.2 no 1.1 2"
        drive.open()


async def test_writes_that_take_a_core_each_are_fewer_than_others_may_begin() -> None:
    async with asyncio.TaskGroup() as tasks:
        drive = _Drive(tasks, 4, 2)
        drive.ask("write", "1", "1", "1", "1", "2", "3")
        assert await drive.begun() == "1 1 2 3"
        drive.open()


async def test_writes_that_take_a_core_each_are_fewer_of_a_user_where_there_are_others() -> None:
    async with asyncio.TaskGroup() as tasks:
        drive = _Drive(tasks, 4, 2)
        drive.open("9")
        drive.ask("write", "9", uid=2)
        drive.ask("write", *map(str, range(8)), uid=1)
        assert await drive.begun() == "9 0 1 2"
        drive.lanes.remove_session(9)
        drive.ask("write", "8", uid=1)
        assert await drive.begun() == "9 0 1 2 3 4", "as many as keep the drive busy, and one more"
        drive.open(*map(str, range(9)))


class _Endless:
    """Jobs that end at once, and are queued again for as long as anything else is to be done."""

    def __init__(self, tasks: asyncio.TaskGroup, num_each: int) -> None:
        self.lanes = Lanes(tasks.create_task, num_each)
        self.begun: list[str] = []
        self._num_to_do = 0

    def once(self, queue: Callable[[int, int, Job], None], session: int, num_bytes: int, name: str) -> None:
        self._num_to_do += 1

        async def job() -> None:
            self.begun.append(name)
            await asyncio.sleep(0)
            self._num_to_do -= 1

        queue(session, num_bytes, job)

    def again_and_again(self, queue: Callable[[int, int, Job], None], session: int, num_bytes: int, name: str) -> None:
        async def job() -> None:
            self.begun.append(name)
            await asyncio.sleep(0)
            if self._num_to_do and len(self.begun) < MOST_BEGUN:
                queue(session, num_bytes, job)

        queue(session, num_bytes, job)


@pytest.mark.parametrize(("read_bytes", "write_bytes"), [(1, PART_BYTES), (PART_BYTES, 1)])
async def test_reads_without_end_leave_writes_a_share_and_keep_theirs(read_bytes: int, write_bytes: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        endless = _Endless(tasks, 2)
        for _ in range(5):  # more than run at once, so one waits at any moment
            endless.again_and_again(endless.lanes.read, 1, read_bytes, "r")
        for _ in range(10):
            endless.once(endless.lanes.write, 2, write_bytes, "w")
    assert endless.begun.count("w") == 10, "writes wait for ever"
    runs = "".join(endless.begun).split("w")[2:-1]  # of reads, between two writes; the first write owes nothing yet
    # The next write begins with the read that pays the last one's debt; its job may come first in the loop.
    fewest, most = 8 * cost(write_bytes) // cost(read_bytes) - 2, 8 * cost(write_bytes) // cost(read_bytes) + 2
    assert all(max(0, fewest) <= len(run) <= most for run in runs)


def cost(num_bytes: int) -> int:
    return num_bytes + JOB_BYTES

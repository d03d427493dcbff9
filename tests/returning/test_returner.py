"""The thread that returns freed memory: when it begins and ends, what it counts, and what becomes of its errors."""

import errno
import gc
import mmap
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.conftest import MakeStore
from tests.existing import set_existing
from tests.inspect_store import inspect
from tests.processes import python
from tierstore import TierStore, tiered_offload
from tierstore.base.config import Mode
from tierstore.returning.allocator import Allocator
from tierstore.returning.returner import Returner
from tierstore.returning.room import resident_bytes

MIB = 2**20
SECONDS = 60.0


class Releases:
    """An allocator that says when it was told to return memory, and returns what the test gives it."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.kept: list[mmap.mmap] = []
        self.preferred_huge: list[bool] = []
        self.told_to_keep: list[bool] = []
        self._lock = threading.Lock()  # what is half touched is not returned
        self.allocator = Allocator(
            "a heap", self._release, prefer_huge_pages=self._prefer_huge_pages, keep_freed=self.told_to_keep.append
        )

    def _prefer_huge_pages(self, huge: bool) -> None:
        self.preferred_huge.append(huge)
        self.happened.set()

    def _release(self) -> None:
        with self._lock:
            for memory in self.kept:
                memory.close()
            self.kept.clear()

    def grow(self, num_bytes: int = 64 * MIB) -> None:
        with self._lock:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory[:: mmap.PAGESIZE] = b"\1" * len(range(0, num_bytes, mmap.PAGESIZE))
            self.kept.append(memory)


class Looks:
    """Counts how often the thread asked whether the store is busy: a look has ended when it asks again."""

    def __init__(self, is_busy: threading.Event | None = None) -> None:
        self._is_busy = is_busy
        self._changed = threading.Condition()
        self._number = 0

    def __call__(self) -> bool:
        with self._changed:
            self._number += 1
            self._changed.notify_all()
        return self._is_busy is None or self._is_busy.is_set()

    def wait_for(self, number: int) -> None:
        """Until so many more have begun."""
        with self._changed:
            wanted = self._number + number
            assert self._changed.wait_for(lambda: self._number >= wanted, SECONDS), "the thread looks no more"


@contextmanager
def running(mode: Mode, releases: Releases, is_busy: threading.Event | None = None) -> Iterator[tuple[Returner, Looks]]:
    """One that has looked once, and its looks."""
    looks = Looks(is_busy)
    returner = Returner(mode, looks, releases.allocator)
    returner.start()
    try:
        looks.wait_for(2)
        yield returner, looks
    finally:
        returner.stop(SECONDS)


def memory_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tierstore-memory"]


def test_growth_is_returned_and_counted_unless_nothing_is_in_the_store() -> None:
    releases, is_busy = Releases(), threading.Event()
    with running("always", releases, is_busy) as (returner, looks):
        releases.grow()
        looks.wait_for(2)
        assert not releases.happened.is_set()
        is_busy.set()
        looks.wait_for(2)
        releases.grow()
        assert releases.happened.wait(SECONDS)
    assert returner.num_returns >= 1
    assert returner.returned_bytes > 16 * MIB
    assert returner.return_seconds > 0
    assert returner.description == "always"
    assert releases.preferred_huge[-1]


def test_limit_is_kept_though_the_store_keeps_nothing() -> None:
    """As that of a memory plan that stores nothing."""
    releases, is_busy = Releases(), threading.Event()
    with running("auto", releases, is_busy) as (returner, _):
        returner.limit(resident_bytes() + 80 * MIB)
        releases.grow()
        assert releases.happened.wait(SECONDS / 2)
        assert not releases.preferred_huge[-1], "heaps are filled by small pages while there is a limit"


def test_allocator_keeps_what_is_freed_only_while_a_store_has_a_limit() -> None:
    releases = Releases()
    with running("always", releases) as (one, _), running("always", releases) as (other, _):
        one.limit(2**50)
        other.limit(2**50)
        one.limit(2**49)
        assert releases.told_to_keep == [True, True]
        one.limit(None)
        assert releases.told_to_keep[-1], "the other store still has a limit"
        other.request_stop()  # all that happens if nobody closes it
        other.stop(SECONDS)
        assert not releases.told_to_keep[-1]
    nobody = Releases()
    Returner("never", lambda: True, nobody.allocator).limit(2**50)
    assert not nobody.told_to_keep, "nobody returns it"


def test_allocator_keeps_what_is_freed_only_while_auto_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.returning.returner._IDLE_AFTER_SECONDS", 0.2)
    releases, is_busy = Releases(), threading.Event()
    with running("auto", releases, is_busy) as (_, looks):
        is_busy.set()
        looks.wait_for(3)
        is_busy.clear()
        while len(releases.told_to_keep) < 2:
            looks.wait_for(1)
    assert releases.told_to_keep == [True, False]


@pytest.mark.parametrize(
    ("mode", "allocator", "description"),
    [
        ("never", Allocator("glibc", lambda: None), "never"),
        ("auto", Allocator("musl", None, "musl offers no way"), "off: musl offers no way"),
        ("always", Allocator("musl", None, "musl offers no way"), "off: musl offers no way"),
        ("auto", Allocator("glibc", lambda: None, "X is set"), "off: X is set"),
        ("never", Allocator("musl", None, "musl offers no way"), "never"),
    ],
)
def test_nothing_to_do_starts_no_thread(mode: Mode, allocator: Allocator, description: str) -> None:
    returner = Returner(mode, lambda: True, allocator)
    returner.start()
    assert not memory_threads()
    assert returner.description == description
    returner.stop(SECONDS)


SET = "MALLOC_TRIM_THRESHOLD_ is set, which decides when glibc returns memory"


@pytest.mark.parametrize("is_limited", [False, True], ids=["always", "limit"])
def test_what_was_asked_for_wins_over_the_environment(is_limited: bool) -> None:
    """The default leaves the allocator alone where a variable decides."""
    releases, looks = Releases(), Looks()
    returner = Returner("auto" if is_limited else "always", looks, releases.allocator._replace(left_alone=SET))
    returner.start()
    try:
        if is_limited:
            assert (memory_threads(), returner.description) == ([], f"off: {SET}")
            returner.limit(resident_bytes() + 80 * MIB)
        assert returner.description == ("auto" if is_limited else "always")
        looks.wait_for(2)
        releases.grow()
        assert releases.happened.wait(SECONDS / 2)
        assert returner.why_memory_stays(2**30, 0) is None
        if is_limited:
            returner.limit(None)
            assert returner.description == f"off: {SET}"
        assert releases.told_to_keep == [True, False] * is_limited, "it returns by itself again"
    finally:
        returner.stop(SECONDS)


def test_no_descriptor_left_is_said_and_tried_again() -> None:
    releases = Releases()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running("always", releases) as (returner, looks):
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            looks.wait_for(2)
            description, use = returner.description, returner.use(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert description.startswith("always; not now: the memory in use cannot be read")
        assert os.strerror(errno.EMFILE) in description
        assert use == (None, None)
        looks.wait_for(2)
        assert returner.description == "always"
        releases.grow()
        assert releases.happened.wait(SECONDS)


@pytest.mark.usefixtures("no_caching_allocator")
def test_what_ends_the_thread_is_in_stats_and_told_once_at_the_end_of_a_scope(make_store: MakeStore) -> None:
    def fail() -> bool:
        raise RuntimeError("a bug")

    store = make_store(return_memory="always")
    assert store.stats().memory_return == "always"
    (thread,) = memory_threads()
    set_existing(inspect(store).returner, _is_busy=fail)
    thread.join(SECONDS)
    assert store.stats().memory_return == "off: its thread ended with RuntimeError('a bug')"
    told = r"freed memory is no longer returned to the system: .* RuntimeError\('a bug'\)"
    with pytest.warns(match=told), tiered_offload(store):
        pass
    with tiered_offload(store):  # a warning would be an error
        pass
    releases = Releases()
    set_existing(inspect(store).returner, _allocator=releases.allocator)
    inspect(store).returner.limit(2**50)
    assert not releases.told_to_keep, "nobody would return what the allocator keeps"
    store.put(torch.ones(1))  # a store to which nothing came says so


@pytest.mark.usefixtures("no_caching_allocator")
def test_close_waits_for_a_return_that_is_on_its_way(make_store: MakeStore) -> None:
    store, releases, began = make_store(return_memory="always"), Releases(), threading.Event()
    returner = inspect(store).returner

    def return_slowly() -> None:
        began.set()
        returner._stopped.wait(SECONDS)
        time.sleep(0.5)  # longer than the rest of close takes: without this, nothing fails

    set_existing(returner, _allocator=Allocator("a heap", return_slowly))
    (thread,) = memory_threads()
    handle = store.put(torch.ones(MIB))
    while not began.wait(0.1):
        releases.grow()
    store.close()
    assert not thread.is_alive()
    assert returner.num_returns == 1
    del handle


@pytest.mark.usefixtures("no_caching_allocator")
def test_last_reference_ends_the_thread(store_directory: Path) -> None:
    store = TierStore(store_directory, host_bytes=0, return_memory="always")
    (thread,) = memory_threads()
    store.put(torch.ones(MIB))
    del store
    gc.collect()
    thread.join(SECONDS)
    assert not thread.is_alive()


PROGRAM = """
import os, sys, threading
os.environ["TIERSTORE_ALLOCATOR"] = "0"
from tierstore.returning import returner as subject
assert "torch" not in sys.modules
import torch
from tierstore import TierStore
from tierstore.returning.allocator import Allocator
store = TierStore(sys.argv[1], host_bytes=0, disk_bytes="256MiB", return_memory="always")
handle = store.put(torch.ones(1_000_000))
store.flush()

def in_child(check):
    child = os.fork()
    is_forked.set()
    if child == 0:
        os._exit(check())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

is_held, is_forked = threading.Event(), threading.Event()
told = []
mine = subject.Returner("auto", lambda: True, Allocator("a heap", lambda: None, keep_freed=told.append))
mine.limit(2**50)
in_child(lambda: 0 if told == [True, False] else 3)  # it keeps nothing for a store that it does not have
mine.limit(None)

def hold():  # as the thread of a store does in the midst of a return
    with subject._one_at_a_time:
        is_held.set()
        is_forked.wait()

def return_memory():
    assert not [t for t in threading.enumerate() if t.name == "tierstore-memory"]
    store.close()
    happened, first_look, kept = threading.Event(), threading.Event(), []
    def is_busy():
        first_look.set()
        return True
    mine = subject.Returner("always", is_busy, Allocator("a heap", happened.set))
    mine.start()
    first_look.wait(30)
    while not happened.is_set() and len(kept) < 64:
        kept.append(b"x" * 2**24)
        happened.wait(0.1)
    mine.stop(30)
    return 0 if mine.num_returns else 3

is_forked.clear()
threading.Thread(target=hold).start()
is_held.wait()
in_child(return_memory)
assert store.get(handle).sum() == 1_000_000
print(store.stats().memory_return)  # and the process ends with an open store
"""


def test_forked_child_has_no_such_thread_and_its_own_store_returns_memory(store_directory: Path) -> None:
    result = python("-W", "error", "-c", PROGRAM, store_directory)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "0\n0\nalways\n"

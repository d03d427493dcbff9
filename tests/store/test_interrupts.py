"""Handlers of signals: what they raise in the midst of a change closes the store; what they call there is refused."""

import gc
import itertools
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.inspect_store import inspect
from tests.moments import ctrl_c, interrupt, moments, out_of_time
from tests.processes import python
from tierstore import StorageIOError, StoreBusyError, StoreClosedError, TierStore, tiered_offload
from tierstore.base.ctrl_c import CTRL_C
from tierstore.base.free_runs import FreeRuns
from tierstore.residency.guard import WAITING
from tierstore.store.engine import Engine
from tierstore.store.lifetime import watch_over
from tierstore.tensors.torch_names import pop_hooks, top_hooks
from tierstore.testing import FaultPlan, FaultyStore, Rule, Signal
from tierstore.tracing.recordings import Recordings

STRIDES = pytest.mark.parametrize(
    "stride",
    [7, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],  # minutes beside other tests
)
"""Of the moments that a signal may come at: each seventh by default, and all of them when asked for."""


@STRIDES
@pytest.mark.parametrize("is_caught", [True, False], ids=["caught", "let go on"])
def test_handler_that_calls_the_store_that_it_interrupts_is_refused(
    make_store: Any, is_caught: bool, stride: int
) -> None:
    """It would wait for ever for the lock that its own thread holds."""
    refused: list[StoreBusyError] = []
    store = make_store(host_bytes=0)

    def ask() -> None:
        try:
            store.stats()
        except StoreBusyError as error:
            refused.append(error)
            if not is_caught:
                raise

    for moment in moments(TierStore.put, ask, stride=stride):
        num_refused = len(refused)
        try:
            with moment:
                handle = store.put(torch.full((1000,), 2.0))
        except StoreBusyError:
            assert not is_caught
            if inspect(store).closed is not None:  # it was in the midst of a change
                with pytest.raises(StoreClosedError, match="StoreBusyError"):
                    store.flush()
                store = make_store(host_bytes=0)
            continue
        assert is_caught or len(refused) == num_refused
        assert torch.equal(store.get(handle), torch.full((1000,), 2.0))
    assert len(refused) > 5 / stride


CALLS: dict[str, Callable[[TierStore], object]] = {
    "put": lambda store: store.put(torch.ones(1000)),
    "stats": TierStore.stats,
    "flush": TierStore.flush,
    "close": TierStore.close,
    "pack": lambda store: step(store),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("is_other", [False, True], ids=["the same store", "another"])
def test_handler_that_calls_a_store_while_its_thread_waits_in_one_is_refused(
    make_store: Any, call: str, is_other: bool
) -> None:
    """The lock is free there. But what the handler waits for, its own thread may have to give back."""
    store, refused = make_store(host_bytes=0), []
    called = make_store(host_bytes=0) if is_other else store

    def ask() -> None:
        with pytest.raises(StoreBusyError) as caught:
            CALLS[call](called)
        refused.append(caught.value)

    for moment in moments(threading.Condition.wait, ask, least=3):
        handle = store.put(torch.ones(1000))
        store.flush()  # it is on disk alone, and has to be waited for
        with moment:
            assert torch.equal(store.get(handle), torch.ones(1000))
    assert len(refused) > 3
    called.put(torch.zeros(1000))
    store.put(torch.zeros(1000))


def test_handler_of_a_signal_that_comes_while_its_thread_waits_for_a_read_is_refused(store_directory: Path) -> None:
    """There is no room for its tensor before that wait is over: both would wait for ever."""
    seen: list[object] = []

    def handle_signal(*_: object) -> None:
        try:
            seen.append(store.put(torch.zeros(2**19)))
        except StoreBusyError as error:
            seen.append(type(error))

    before = signal.signal(signal.SIGUSR1, handle_signal)
    try:
        with FaultyStore(store_directory, host_bytes=0, staging_bytes="1MiB", disk_bytes="2MiB", codec="none") as store:
            handle = store.put(torch.ones(2**18))
            store.flush()
            store.faults.set(FaultPlan((Rule("read", Signal(os.getpid(), signal.SIGUSR1)),)))
            assert torch.equal(store.get(handle), torch.ones(2**18))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [StoreBusyError]


def test_interrupt_that_ends_a_wait_leaves_its_thread_free_to_call(make_store: Any) -> None:
    """Also if it comes before the thread is struck off the list of those that wait."""
    store = make_store(host_bytes=0)
    WAITING.add(threading.get_ident())
    other = make_store(host_bytes=0)
    assert torch.equal(store.get(store.put(torch.ones(1000))), torch.ones(1000))
    other.put(torch.ones(1000))
    assert threading.get_ident() not in WAITING


@STRIDES
@pytest.mark.parametrize(
    ("function", "first"),
    [(Engine._wait_until_open, 2), (Recordings.__init__, 1), (watch_over, 1)],
    ids=["waiting", "later", "at the end"],
)
def test_store_interrupted_while_it_is_opened_ends(
    store_directory: Path, function: Any, first: int, stride: int
) -> None:
    """Its engine runs by then, and nobody has the store: what it holds would be held as long as the process."""
    for moment in moments(function, interrupt, first=first, stride=stride, least=first):
        interrupts: list[KeyboardInterrupt] = []
        with moment:
            try:
                TierStore(store_directory).close()
            except KeyboardInterrupt as error:
                interrupts.append(error)
        if function is not Engine._wait_until_open:  # there an interactive interpreter may keep the traceback
            interrupts.clear()
        for thread in threading.enumerate():
            if thread.name.startswith("tierstore"):
                thread.join(10)
                assert not thread.is_alive(), f"moment {moment.number}: {thread.name} still runs"


class Door(NamedTuple):
    """A call of the store that a handler comes into.

    Attributes:
        use: makes it, after what it needs.
        function: the moments are those of this one, and of all that it calls.
        most_closed: the share of them in which an error of the handler may close the store.
        are_few: all of them are met, by default too.
    """

    use: Callable[[TierStore, AbstractContextManager[object]], object]
    function: Any
    most_closed: float
    are_few: bool = False


def put(store: TierStore, moment: AbstractContextManager[object]) -> None:
    with moment:
        store.put(torch.ones(1100))


def get(store: TierStore, moment: AbstractContextManager[object]) -> None:
    handle = store.put(torch.ones(1100))
    store.flush()  # it is on disk alone, and has to be waited for
    with moment:
        assert torch.equal(store.get(handle), torch.ones(1100))


_DEVICE_BYTES = itertools.cycle(("1MiB", "2MiB"))


def step(store: TierStore, moment: AbstractContextManager[object] | None = None) -> torch.Tensor:
    """The gradient."""
    weight = torch.full((1100,), 0.5, requires_grad=True)  # with 64 KiB of staging, too large for a group
    with moment or nullcontext():
        train(store, weight)
    assert weight.grad is not None
    return weight.grad


def train(store: TierStore, weight: torch.Tensor) -> None:
    """What may stay on an accelerator differs from step to step, so that each entry changes the books."""
    with tiered_offload(store, min_bytes=0, device_bytes=next(_DEVICE_BYTES)):
        loss = (weight * weight).exp().sin().sum()
    store.flush()
    loss.backward()


DOORS = {
    "put": Door(put, TierStore.put, 0.6),
    "get": Door(get, TierStore.get, 0.4, are_few=True),
    "a wait": Door(get, threading.Condition.wait, 0.0, are_few=True),
    "a scope is entered": Door(step, tiered_offload.__enter__, 0.15, are_few=True),
    "a step": Door(step, train, 0.33),
}


def sweep(open_store: Callable[[], TierStore], door: str, handle: Callable[[], None], stride: int) -> None:
    """At any moment, the interrupt leaves the store open and whole, or closed, and says so.

    Where it is open, what it is used for afterwards is right, and nothing stays behind. Ctrl-C, which is held back
    meanwhile, closes it hardly ever; another error of a handler does where something is half changed, but only there.
    """
    use, function, most_closed, are_few = DOORS[door]
    store = open_store()
    expected = step(store)
    num_moments = num_closed = num_hooks_left = 0
    for moment in moments(function, handle, stride=1 if are_few else stride, least=3 if are_few else 20):
        kept, notes = store.put(torch.full((1100,), 2.0)), list[str]()
        try:
            use(store, moment)
        except (KeyboardInterrupt, TimeoutError) as error:
            assert moment.has_come
            notes = [note for note in getattr(error, "__notes__", ()) if "tierstore: " in note]
        is_closed = inspect(store).closed is not None
        assert is_closed == bool(notes), f"moment {moment.number}"
        num_moments += 1
        num_closed += is_closed
        num_hooks_left += take_hooks_off()
        if is_closed:
            with pytest.raises(StoreClosedError, match=r"KeyboardInterrupt|TimeoutError"):
                store.get(kept)
            with suppress(StorageIOError):  # its engine met the half changed books
                store.close()
            store = open_store()
        else:
            assert torch.equal(store.get(kept), torch.full((1100,), 2.0))
            assert not CTRL_C.is_held
            del kept
            assert held_by(store) == (0, 0, 0, 0, 0), f"moment {moment.number}"
        assert torch.equal(step(store), expected), f"moment {moment.number}"
        assert held_by(store) == (0, 0, 0, 0, 0), f"moment {moment.number}"
    assert num_hooks_left <= (door == "a step"), "only as a scope begins to be left, when nothing of ours has run yet"
    if handle is ctrl_c:
        assert num_closed <= max(1, 0.05 * num_moments)
    else:
        assert num_closed or not most_closed
        assert num_closed <= most_closed * num_moments or (stride > 1 and not are_few), f"{num_closed} of {num_moments}"


def held_by(store: TierStore) -> tuple[int, ...]:
    torch.zeros((), requires_grad=True).backward()  # lets go of what an interrupted backward held
    gc.collect()
    store.flush()
    now = store.stats()
    return now.live_handles, now.host_bytes, now.staging_used_bytes, now.lent_bytes, now.disk_bytes


def take_hooks_off() -> int:
    """Those that a scope has left on the thread; how many."""
    num_left = 0
    while top_hooks(True) is not None:
        pop_hooks()
        num_left += 1
    return num_left


@pytest.mark.usefixtures("unvalidated")
# As a generator is closed: there CPython handles no signal, but calls the profiler.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@STRIDES
@pytest.mark.parametrize("handle", [ctrl_c, out_of_time])
@pytest.mark.parametrize(
    ("door", "host_bytes"),
    [*((door, "0") for door in DOORS), *((door, "1MiB") for door in ("put", "get", "a step"))],
)
def test_interrupted_at_any_moment_the_store_is_open_and_whole_or_says_that_it_is_closed(
    make_store: Any, door: str, host_bytes: str, handle: Callable[[], None], stride: int
) -> None:
    sweep(lambda: make_store(host_bytes=host_bytes, staging_bytes="64KiB"), door, handle, stride)


SUITE = """
import time, pytest, torch
from tests.inspect_store import inspect
from tierstore import TierStore, tiered_offload

@pytest.fixture(scope="session")
def store(tmp_path_factory):
    with TierStore(tmp_path_factory.mktemp("drive"), host_bytes=0, disk_bytes="256MiB") as store:
        yield store

def train(store, hang=lambda: None):
    weight = torch.full((100_000,), 0.5, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = (weight * weight).exp()
        hang()
        loss = loss.sin().sum()
    loss.backward()
    plain = torch.full((100_000,), 0.5, requires_grad=True)
    (plain * plain).exp().sin().sum().backward()
    assert torch.equal(weight.grad, plain.grad)

def test_hangs_in_its_own_code(store):
    train(store, lambda: time.sleep(100))

def test_hangs_in_a_wait_of_the_store(store):
    inspect(store).wait_for_room()  # for progress that nobody makes

def test_uses_the_store(store):
    train(store)
"""


@pytest.mark.slow  # runs pytest
def test_time_limits_of_a_suite_leave_a_store_of_the_session_open(tmp_path: Path) -> None:
    """pytest-timeout raises in a handler of SIGALRM. Where that comes in the midst of a change, the store is closed."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    options = ("-p", "no:cacheprovider", "--timeout=1", "--timeout-method=signal", "-q")
    done = python("-m", "pytest", *options, ".", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("Failed: Timeout") >= 2, done.stdout


def test_second_interrupt_before_the_first_has_closed_the_store_closes_it_at_the_next_call(
    make_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(host_bytes=0)
    with monkeypatch.context() as twice:
        twice.setattr("tierstore.ledger.down.Down.admit", lambda *_: interrupt())
        twice.setattr("tierstore.residency.guard.is_interrupt", lambda _: interrupt())
        with pytest.raises(KeyboardInterrupt):
            store.put(torch.ones(1000))
    with pytest.raises(StoreClosedError, match="an interrupt came in the middle of a change"):
        store.put(torch.ones(1000))


@pytest.mark.usefixtures("no_caching_allocator")
def test_what_is_half_changed_does_not_keep_the_engine_from_ending(make_store: Any) -> None:
    """The list of free memory is half changed when the engine's thread gives back a slot that somebody still had."""
    num_closed = 0
    for moment in moments(FreeRuns.allocate, interrupt, least=5):
        store = make_store(host_bytes=0)
        handles = [store.put(torch.full((size,), 1.0)) for size in (*[2**16] * 7, 60_000)]
        store.flush()
        lent = [store.get(handle) for handle in handles[:7]]  # they leave less than a slot of the 2 MiB in use
        del lent[3], handles[3]  # most of its slot is taken next, and the slots behind it are given back at last
        with suppress(KeyboardInterrupt), moment:
            store.get(handles[6])
        num_closed += inspect(store).closed is not None
        del lent
        store.close()  # an error of the thread would be a warning, and so an error of this test
        assert not store._core.engine.is_running
    assert num_closed > 5

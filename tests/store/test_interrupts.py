"""Handlers of signals: what they raise in the midst of a change closes the store; what they call there is refused."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.daemon.conftest import environment_of_tests
from tests.inspect_store import inspect
from tests.moments import ctrl_c, interrupt, moments, out_of_time
from tierstore import StoreBusyError, StoreClosedError, TierStore, tiered_offload
from tierstore.base.free_runs import FreeRuns
from tierstore.hooks.saved import SavedTensor
from tierstore.hooks.scope import OffloadScope
from tierstore.residency.guard import WAITING
from tierstore.residency.torch_names import pop_hooks, top_hooks
from tierstore.store.engine import Engine
from tierstore.store.lifetime import watch_over
from tierstore.testing import FaultPlan, FaultyStore, Rule, Signal
from tierstore.tracing.recordings import Recordings

STRIDES = pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
"""Of the moments that a signal may come at: each seventh by default, and all of them when asked for."""


@STRIDES
def test_handler_that_raises_an_error_in_the_midst_of_a_put_closes_the_store_or_changes_nothing(
    make_store: Any, stride: int
) -> None:
    """Not only Ctrl-C: whoever gives a step a time limit with SIGALRM raises some Exception."""
    store = make_store(host_bytes=0)
    num_closed = 0
    for moment in moments(TierStore.put, out_of_time, stride=stride):
        kept = store.put(torch.full((1000,), 1.0))
        closed: list[str] = []
        try:
            with moment:
                store.put(torch.full((1000,), 2.0))
        except TimeoutError as error:
            closed = [note for note in getattr(error, "__notes__", ()) if "tierstore: " in note]
        else:
            assert not moment.has_come
        try:
            assert torch.equal(store.get(kept), torch.full((1000,), 1.0))
            store.flush()
            assert not closed, "it says that it is closed"
        except StoreClosedError:
            assert "TimeoutError" in closed[0]
            num_closed += 1
            store = make_store(host_bytes=0)
    assert num_closed > 5 / stride


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


def step(store: TierStore, *, in_forward: Any = None, in_backward: Any = None) -> torch.Tensor:
    """The gradient; the moments are those of one half alone."""
    weight = torch.full((1100,), 0.5, requires_grad=True)  # with 64 KiB of staging, too large for a group
    with in_forward or nullcontext(), tiered_offload(store, min_bytes=0):
        loss = (weight * weight).exp().sin().sum()
    store.flush()
    with in_backward or nullcontext():
        loss.backward()
    assert weight.grad is not None
    return weight.grad


def held_by(store: TierStore) -> tuple[int, ...]:
    torch.zeros((), requires_grad=True).backward()  # lets go of what an interrupted backward held
    gc.collect()
    store.flush()
    now = store.stats()
    return now.live_handles, now.host_bytes, now.staging_used_bytes, now.lent_bytes, now.disk_bytes


@pytest.fixture
def _hooks_taken_off() -> Iterator[None]:
    """An interrupt as a scope begins to be left, before anything of ours runs, leaves its hooks on the thread."""
    yield
    while top_hooks(True) is not None:
        pop_hooks()


@pytest.mark.usefixtures("_hooks_taken_off")
# As a generator is closed: there CPython handles no signal, but calls the profiler.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("function", "half", "most_closed"),
    # Where all that is done under the lock counts as a change, 31 of 87 and most of 400 close it, 91 of 98 and 116 of
    # 123, 102 of 151 and 196 of 255.
    [
        (OffloadScope.pack, "in_forward", {"1MiB": 0.34, "0": 0.75}),
        (tiered_offload.__exit__, "in_forward", {"1MiB": 0.75, "0": 0.8}),
        (SavedTensor.unpack, "in_backward", {"1MiB": 0.35, "0": 0.55}),
    ],
    ids=["pack", "scope left", "unpack"],
)
@pytest.mark.parametrize("host_bytes", ["1MiB", "0"])
@pytest.mark.parametrize(
    ("handle", "stride"),
    [
        (out_of_time, 61),  # those few say nothing of a share
        (ctrl_c, 7),
        *(pytest.param(handle, 1, marks=pytest.mark.slow) for handle in (out_of_time, ctrl_c)),
    ],
)
def test_interrupt_where_nothing_is_half_changed_leaves_the_store_open(
    make_store: Any,
    function: Any,
    half: str,
    most_closed: dict[str, float],
    host_bytes: str,
    handle: Callable[[], None],
    stride: int,
) -> None:
    """What the store is used for afterwards is right, and nothing stays behind: its books are whole. Ctrl-C, which is
    held back meanwhile, closes it hardly ever."""
    store = make_store(host_bytes=host_bytes, staging_bytes="64KiB")
    expected = step(store)
    num_moments = num_closed = 0
    for moment in moments(function, handle, stride=stride, least=40):
        with suppress(KeyboardInterrupt, TimeoutError, StoreClosedError):
            step(store, **{half: moment})
        num_moments += 1
        if inspect(store).closed is None:
            assert held_by(store) == (0, 0, 0, 0, 0), f"moment {moment.number}"
            assert torch.equal(step(store), expected), f"moment {moment.number}"
            assert held_by(store) == (0, 0, 0, 0, 0), f"moment {moment.number}"
        else:
            num_closed += 1
            store = make_store(host_bytes=host_bytes, staging_bytes="64KiB")
            step(store)
    if handle is ctrl_c:
        assert num_closed <= max(1, 0.05 * num_moments)
    elif stride == 1:
        assert 0 < num_closed <= most_closed[host_bytes] * num_moments, f"{num_closed} of {num_moments}"


def test_interrupt_as_a_wait_begins_leaves_the_store_open(make_store: Any) -> None:
    """Between the moment in which the condition lets go of the lock and the one in which it waits, for one."""
    store = make_store(host_bytes=0)
    for moment in moments(threading.Condition.wait, interrupt, least=3):
        handle = store.put(torch.ones(1000))
        store.flush()  # it is on disk alone, and has to be waited for
        with suppress(KeyboardInterrupt), moment:
            assert torch.equal(store.get(handle), torch.ones(1000))
        store.put(torch.zeros(1000))
    assert torch.equal(store.get(handle), torch.ones(1000))


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


def test_time_limits_of_a_suite_leave_a_store_of_the_session_open(tmp_path: Path) -> None:
    """pytest-timeout raises in a handler of SIGALRM. Where that comes in the midst of a change, the store is closed."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout=1", "--timeout-method=signal", "-q"]
    env = environment_of_tests(OMP_NUM_THREADS="1")
    done = subprocess.run([*command, "."], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env)
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

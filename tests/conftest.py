"""Fixtures for all tests: stores on a real directory, and a check after each test that nothing was left behind."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
from pytest_asyncio import is_async_test

from tests.census import Census
from tests.descriptors import descriptors_of
from tierstore import TierStore
from tierstore.demo.model import choose_vector_kernels
from tierstore.disk.native import SWITCH

MakeStore = Callable[..., TierStore]
_CENSUS = pytest.StashKey[Census]()
_HAS_FIXTURES = pytest.StashKey[bool]()
"""Of a module with fixtures for all of its tests."""
_OF_LOOPS = ("[eventpoll]", "[eventfd]")
"""Descriptors that each event loop has, and each pool of threads without the interpreter."""
_OF_CUDA = "[eventfd]"
"""Descriptors that its driver opens as it is used, and keeps until the process ends."""


@pytest.hookimpl(trylast=True)  # after pytest-xdist's own
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CENSUS] = Census()
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # a shell's background; whoever is started from here inherits it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # before MKL's first call; Intel promises the same bits with it
    choose_vector_kernels()  # else the first of two trainings that a test compares may be less exact
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // num_workers))
    if config.pluginmanager.hasplugin("dsession"):  # pytest-xdist, in the process that hands out the tests
        config.pluginmanager.register(_CensusOfWorkers(config.stash[_CENSUS]))


class _CensusOfWorkers:
    """Adds up what the workers of a parallel run have counted."""

    def __init__(self, census: Census) -> None:
        self._census = census

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._census.add(getattr(node, "workeroutput", {}).get("census", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["census"] = session.config.stash[_CENSUS].as_dict()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash[_CENSUS].lines()
    if lines:
        terminalreporter.section("cases covered")
    for line in lines:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def census(pytestconfig: pytest.Config) -> Census:
    """Where suites of many cases keep count; printed at the end of the run."""
    return pytestconfig.stash[_CENSUS]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Async tests run on the loop that the engine and the daemon have."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    if fixturedef.scope == "module" and fixturedef.argname != "_thawed":
        request.node.stash[_HAS_FIXTURES] = True


@pytest.fixture(autouse=True, scope="module")
def _thawed(request: pytest.FixtureRequest) -> Iterator[None]:
    """What fixtures of the whole module have left is collected, where there are any: all is looked through for that."""
    yield
    if _HAS_FIXTURES in request.node.stash:
        gc.unfreeze()
        gc.collect()


@pytest.fixture(autouse=True)
def _nothing_leaks(tmp_path: Path) -> Iterator[None]:
    """No thread, descriptor or file of a store outlives its test, nor does a loop."""
    gc.collect()  # what the last test's fixtures have left
    gc.freeze()  # what modules and other tests have made is not looked through at every `gc.collect()` of this one
    threads, descriptors = set(threading.enumerate()), descriptors_of()
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread not in threads and thread.name.startswith("tierstore"):
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} still runs"
    leaked = {
        fd: target
        for fd, target in descriptors_of().items()
        if fd not in descriptors
        and any(part in target for part in (str(tmp_path), *_OF_LOOPS))
        and not (torch.cuda.is_initialized() and _OF_CUDA in target)
    }
    assert not leaked, f"descriptors still open: {leaked}"


@pytest.fixture
async def _quiet_loop() -> AsyncIterator[None]:
    """No task outlives its test, and nothing fails that only the loop is told of: its default is to log that.

    A time limit is such a failure: while the loop waits, the signal's handler runs in a callback of the loop's.
    """
    told: list[dict[str, Any]] = []

    def tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        told.append(context)
        if isinstance(context.get("exception"), pytest.fail.Exception):
            for task in asyncio.all_tasks(loop):
                task.cancel(str(context["exception"]))

    asyncio.get_running_loop().set_exception_handler(tell)
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks still run: {left}"
    gc.collect()  # a task is told of when it is freed
    assert not told, f"the loop was told of {told}"


@pytest.fixture(autouse=True)
def _quiet_loop_of_async_test(_nothing_leaks: None, request: pytest.FixtureRequest) -> None:
    if is_async_test(request.node):
        request.getfixturevalue("_quiet_loop")


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Only reference counts free anything: a reference cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def store_directory(tmp_path: Path) -> Iterator[Path]:
    """An empty directory for a store; must be empty again at the end."""
    directory = tmp_path / "drive"
    directory.mkdir()
    yield directory
    assert list(directory.iterdir()) == [], "files were left behind"


@pytest.fixture
def make_store(store_directory: Path) -> Iterator[MakeStore]:
    """Opens stores on `store_directory` that send everything to disk unless told otherwise; closes them at the end."""
    stores: list[TierStore] = []

    def make(**options: object) -> TierStore:
        settings: dict[str, object] = {"host_bytes": 0, "disk_bytes": "2GiB", "codec": "none"}
        stores.append(TierStore(store_directory, **(settings | options)))  # type: ignore[arg-type]
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def no_caching_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that are opened now have a thread that returns memory, and a slab of their own."""
    monkeypatch.setenv("TIERSTORE_ALLOCATOR", "0")


@pytest.fixture
def no_native_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that are opened now transfer all records in Python, where a test may watch or hold that."""
    monkeypatch.setenv(SWITCH, "0")


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that are opened now are validated whenever their lock is let go of: `tierstore/ledger/validation.py`."""
    monkeypatch.setenv("TIERSTORE_VALIDATE", "1")


@pytest.fixture
def unvalidated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `validated` is not asked for: where each call of a store counts."""
    monkeypatch.delenv("TIERSTORE_VALIDATE", raising=False)


@pytest.fixture
def store(make_store: MakeStore) -> TierStore:
    return make_store()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

"""How a process ends, forks and is killed while stores are open: each in a process of its own.

Importing torch takes seconds, so most of these processes are forked from one that has only imported it.
"""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.descriptors import descriptors_of
from tests.forked import Forked, forking

PREAMBLE = """
import gc, os, signal, sys, threading, time
import torch
from tests.descriptors import descriptors_of
from tests.inspect_store import inspect
from tierstore import *
torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
directory = sys.argv[1]
options = dict(host_bytes=0, disk_bytes="1GiB", codec="none")
def tensor(i=0):
    return torch.arange(50_000, dtype=torch.float32) + i
def files_of(process):
    return [target for target in descriptors_of(process).values() if directory in target]
def in_child(action):
    "Forks; the child's exit code."
    process = os.fork()
    if process == 0:
        try:
            action()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
def raises(error, call, *arguments):
    try:
        call(*arguments)
    except error as raised:
        return raised
    raise AssertionError(f"{error} was not raised")
"""
OPEN = "store = TierStore(directory, **options)\n"
OPTIONS = ("-X", "faulthandler", "-W", "error")


def _start(directory: Path, program: str, before: str = "") -> subprocess.Popen[str]:
    """The program runs with a store open; `before` runs before tierstore is imported."""
    code = textwrap.dedent(before) + PREAMBLE + OPEN + textwrap.dedent(program)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *OPTIONS, "-c", code, directory], text=True, **pipes)


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    with forking(PREAMBLE, tmp_path_factory.mktemp("forked"), *OPTIONS) as run:
        yield run


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(forked: Forked, store_directory: Path) -> Run:
    """Runs a program with a store open to its end; gives what it wrote to its output, and its errors."""

    def run(program: str, returncode: int = 0) -> tuple[str, str]:
        done = forked(OPEN + textwrap.dedent(program), directory=str(store_directory))
        assert done.returncode == returncode, done
        return done.stdout, done.stderr

    return run


ENDINGS = {
    "a daemon thread that waits in it": """
        store = TierStore(directory, **options, staging_bytes=0)
        def work():
            try:
                kept = [store.put(tensor(i)) for i in range(100_000)]
            except (StoreClosedError, StoreFullError):
                pass
        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        store.put(tensor())
        """,
    "a thread that goes on": """
        def work():
            for i in range(50):
                assert torch.equal(store.get(store.put(tensor(i))), tensor(i))
        threading.Thread(target=work).start()
        """,
    "use at exit": """
        import atexit
        handle = store.put(tensor())
        def late():
            try:
                assert torch.equal(store.get(handle), tensor())
            except StoreClosedError:
                pass
        atexit.register(late)
        """,
    "use after the hooks": """
        class Late:
            def __del__(self):
                try:
                    self.store.put(self.tensor)
                except self.errors:
                    pass
        late = Late()
        late.store, late.tensor, late.errors = store, tensor(), (StoreClosedError,)
        late.me = late
        """,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_exit_with_a_store_open_is_clean(run: Run, ending: str) -> None:
    assert run(ENDINGS[ending]) == ("", "")


def test_exit_leaves_no_thread_of_a_store_running(store_directory: Path) -> None:
    """One that still ran while the interpreter is taken apart could abort the process. Exit hooks run last first."""
    before = """
        import atexit, threading
        def look():
            print([thread.name for thread in threading.enumerate() if thread.name.startswith("tierstore")])
        atexit.register(look)
        """
    with _start(store_directory, "handles = [store.put(tensor(i)) for i in range(40)]", before) as process:
        assert process.communicate() == ("[]\n", "")
    assert process.returncode == 0


# --- fork ---------------------------------------------------------------------------------------------------------


def test_fork_child_has_no_file_and_cannot_use_what_it_inherited(run: Run) -> None:
    run(
        """
        on_disk = store.put(tensor())
        handles = [store.put(tensor(i)) for i in range(30)]
        store.flush()
        assert files_of("self")
        in_memory = store.put(torch.empty(0))
        def child():
            assert files_of("self") == []
            for handle in (on_disk, in_memory):
                error = raises(StoreClosedError, store.get, handle)
                assert "forked" in str(error), error
            raises(StoreClosedError, store.put, tensor())
            raises(StoreClosedError, store.flush)
            store.prefetch([on_disk])
            store.stats()
            store.close()
            with TierStore(directory, **options) as own:
                mine = own.put(tensor(5))
                own.flush()
                assert torch.equal(own.get(mine), tensor(5))
            handles.clear()
            gc.collect()
        assert in_child(child) == 0
        assert torch.equal(store.get(on_disk), tensor())
        assert files_of("self")
        for i, handle in enumerate(handles):
            assert torch.equal(store.get(handle), tensor(i))
        """,
    )


def test_fork_child_exits_and_the_parent_goes_on(run: Run) -> None:
    _, err = run(
        """
        handles = [store.put(tensor(i)) for i in range(20)]
        process = os.fork()
        if process == 0:
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        for i, handle in enumerate(handles):
            assert torch.equal(store.get(handle), tensor(i))
        """,
    )
    assert err == ""


def test_fork_while_others_put_harms_neither_side(run: Run) -> None:
    _, err = run(
        """
        sys.setswitchinterval(1e-6)
        store = TierStore(directory, **options, staging_bytes="1MiB")
        over = threading.Event()
        failures = []
        def work(seed):
            kept = []
            i = seed
            try:
                while not over.is_set():
                    i += 1
                    kept.append((i, store.put(tensor(i))))
                    number, handle = kept[i * 7 % len(kept)]
                    assert torch.equal(store.get(handle), tensor(number))
                    del kept[:-10], handle
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(3)]
        torch.equal(tensor(), tensor())  # what torch sets up at a first use, a child must not find half done
        for thread in threads:
            thread.start()
        def child():
            assert files_of("self") == [], files_of("self")
            raises(StoreClosedError, store.put, tensor())
            store.close()
        try:
            for _ in range(25):
                assert in_child(child) == 0
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not failures, failures
        """,
    )
    assert "Exception ignored" not in err, err
    assert "Traceback" not in err, err


def test_fork_while_an_unreferenced_store_still_writes_gives_the_child_no_file(run: Run) -> None:
    run(
        """
        go_on = inspect(store).stall()
        del store
        gc.collect()
        def child():
            assert files_of("self") == [], files_of("self")
        code = in_child(child)
        go_on.set()
        assert code == 0
        """,
    )


def test_fork_child_that_outlives_a_killed_parent_keeps_no_disk_space(store_directory: Path) -> None:
    process = _start(
        store_directory,
        """
        handles = [store.put(torch.randn(1 << 20)) for _ in range(8)]
        store.flush()
        if os.fork() == 0:
            print(os.getpid(), flush=True)  # only now has it done what a child does first
            sys.stdin.read()
            os._exit(0)
        time.sleep(60)
        """,
    )
    with process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        process.wait(20)
        try:
            assert not [target for target in descriptors_of(child).values() if str(store_directory) in target]
            mapped = Path(f"/proc/{child}/maps").read_text()
            assert str(store_directory) not in mapped, "a mapping keeps the space too"
        finally:
            os.kill(child, signal.SIGKILL)
    assert list(store_directory.iterdir()) == []


# --- Ctrl-C -------------------------------------------------------------------------------------------------------

STALL = """
        def interrupt_when_waiting():
            while not inspect(store).num_waiting:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("what", ["put", "get", "flush"])
def test_interrupt_ends_a_wait_and_the_store_stays_usable(run: Run, what: str) -> None:
    calls = {
        "put": "go_on = inspect(store).stall(); kept = store.put(tensor(1)); call = lambda: store.put(tensor(2))",
        "get": "go_on = inspect(store).stall(); call = lambda: store.get(handle)",
        "flush": "go_on = inspect(store).stall(); kept = store.put(tensor(1)); call = store.flush",
    }
    run(
        STALL
        + f"""
        store = TierStore(directory, **options, staging_bytes="200000B")
        handle = store.put(tensor())
        store.flush()
        {calls[what]}
        threading.Thread(target=interrupt_when_waiting).start()
        raises(KeyboardInterrupt, call)
        go_on.set()
        for i in range(10):
            other = store.put(tensor(i))
            store.flush()
            assert torch.equal(store.get(other), tensor(i))
        assert torch.equal(store.get(handle), tensor())
        del other, handle
        kept = None
        store.flush()
        end = time.monotonic() + 20
        while store.stats().disk_bytes or store.stats().staging_used_bytes or store.stats().live_handles:
            assert time.monotonic() < end, store.stats()
        store.close()
        """,
    )

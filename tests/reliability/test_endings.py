"""How a process that uses a store ends, pickles it, and makes workers: both kinds of store."""

import pickle
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from tests.daemon.clients import sessions_of
from tests.daemon.conftest import StartDaemon, environment_of_tests
from tests.descriptors import descriptors_of
from tests.forked import forking
from tests.reliability.conftest import end_well
from tests.waiting import until
from tierstore import TierStore, tiered_offload
from tierstore.hooks.saved import SavedTensor

WAIT_SECONDS = 60.0


PREAMBLE = """
import sys, torch
from tests.reliability.trainers import open_store
from tierstore import StoreClosedError, tiered_offload
torch.set_num_threads(1)
"""
BEGINNING = """
store = open_store(kind, address, 0)
weight = torch.randn(600, 600, requires_grad=True)
def graph():
    with tiered_offload(store, min_bytes=0):
        return (weight.exp() * weight.sin()).cos().sum()
"""
ENDINGS: dict[str, tuple[int, str]] = {
    "a graph alive, on disk": (
        0,
        """
        loss = graph()
        store.flush()
        """,
    ),
    "graphs and results in cycles": (
        0,
        """
        for _ in range(4):
            cycle = [graph()]
            cycle.append(cycle)
        handles = [store.put(torch.randn(50_000)) for _ in range(8)]
        results = [store.get(handle) for handle in handles]
        """,
    ),
    "a backward under way on a daemon thread": (
        0,
        """
        import threading
        begun = threading.Event()
        def work():
            try:
                while True:
                    graph().backward()
                    begun.set()
            except StoreClosedError:
                pass
        threading.Thread(target=work, daemon=True).start()
        begun.wait(60)
        """,
    ),
    "sys.exit in a thread with a live graph": (
        0,
        """
        import threading
        losses = []
        def work():
            losses.append(graph())
            sys.exit(3)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        """,
    ),
    "sys.exit in a hook of backward": (
        7,
        """
        import sys
        loss = graph()
        store.flush()
        weight.register_hook(lambda _: sys.exit(7))
        loss.backward()
        """,
    ),
    "writes in flight": (
        0,
        """
        handles = [store.put(torch.randn(50_000)) for _ in range(40)]
        """,
    ),
    "a store without references": (
        0,
        """
        handles = [store.put(torch.randn(50_000)) for _ in range(10)]
        del handles, store
        """,
    ),
}
"""What programs do that end with a store in use, and their exit codes."""


def outcomes(kind: str, address: Path, folder: Path) -> dict[str, tuple[int, str]]:
    """The exit codes, and all that was said."""
    options, env = ("-W", "error", "-X", "faulthandler"), environment_of_tests(OMP_NUM_THREADS="1")
    found = {}
    with forking(PREAMBLE, folder, *options, environment=env) as run:
        for name, (_, ending) in ENDINGS.items():
            done = run(BEGINNING + dedent(ending), kind=kind, address=str(address))
            found[name] = done.returncode, done.stdout + done.stderr
    return found


EXPECTED = {name: (code, "") for name, (code, _) in ENDINGS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "directories", ["one drive", pytest.param("two drives", marks=pytest.mark.many)], indirect=True
)
def test_exit_with_an_embedded_store_in_use_is_quiet_and_leaves_nothing(directories: Path, tmp_path: Path) -> None:
    """The fixture looks at the directories."""
    assert outcomes("embedded", directories, tmp_path) == EXPECTED


@pytest.mark.slow
def test_exit_with_a_daemon_s_store_in_use_is_quiet_and_ends_the_session(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon(codec="none", disk_bytes="64MiB", grace_seconds=0.1)
    assert outcomes("sidecar", daemon.socket, tmp_path) == EXPECTED
    until(lambda: not sessions_of(daemon))  # one that could not say that it closes has a lease
    end_well(daemon)
    assert list(daemon.path.iterdir()) == []


def saved_tensor(store: TierStore, monkeypatch: pytest.MonkeyPatch) -> tuple[SavedTensor, torch.Tensor]:
    """What a graph holds in the place of a saved tensor, and the graph's root."""
    made: list[SavedTensor] = []
    init = SavedTensor.__init__

    def note(saved: SavedTensor, *arguments: object) -> None:
        init(saved, *arguments)  # type: ignore[arg-type]
        made.append(saved)

    monkeypatch.setattr(SavedTensor, "__init__", note)
    weight = torch.randn(300, 300, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = weight.exp().sin().sum()
    return made[0], loss


def test_pickled_store_handle_and_saved_tensor_say_that_they_cannot_be(
    store: TierStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = store.put(torch.randn(1000))
    things: list[tuple[object, str]] = [(store, "store"), (handle, "handle")]
    saved, _loss = saved_tensor(store, monkeypatch)
    things.append((saved, "saved tensor"))
    for thing, word in things:
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError, match=f"tierstore {word} .*cannot be pickled"):
                pickle.dumps(thing, protocol)


def held_of_a_store(directory: str) -> list[str]:
    """What descriptors of this process lead to: files in that directory, memory shared with a daemon."""
    return [
        target for target in descriptors_of().values() if directory in target or target.startswith("/memfd:tierstore")
    ]


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Refuses to work in a process that holds something of a store's in `directory`, or of one with a daemon."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        assert not held_of_a_store(self.directory), held_of_a_store(self.directory)
        return torch.full((4,), float(index))


def train_with_workers(store: TierStore, directory: Path) -> None:
    assert held_of_a_store(str(directory)), "what workers must not hold cannot be seen"
    torch.manual_seed(0)
    weight = torch.randn(4, 5000, requires_grad=True)
    loader = torch.utils.data.DataLoader(
        Numbers(directory=str(directory)),
        batch_size=4,
        num_workers=1,
        multiprocessing_context="fork",
        timeout=WAIT_SECONDS,
    )
    held = store.put(torch.arange(50_000))
    for batch in loader:
        with tiered_offload(store, min_bytes=0):
            loss = (batch @ weight).cos().exp().sum()
        store.flush()
        (found,) = torch.autograd.grad(loss, [weight])
        (expected,) = torch.autograd.grad((batch @ weight).cos().exp().sum(), [weight])
        assert torch.equal(found, expected)
    assert torch.equal(store.get(held), torch.arange(50_000))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_data_loader_workers_during_training_disturb_nothing(
    start_daemon: StartDaemon, store: TierStore, store_directory: Path
) -> None:
    train_with_workers(store, store_directory)
    daemon = start_daemon(codec="none", disk_bytes="64MiB", grace_seconds=0.1)
    with TierStore.connect(daemon.socket, host_bytes=0) as remote:
        train_with_workers(remote, store_directory)
    assert sessions_of(daemon) == {}
    assert daemon.stop() == 0, daemon.log

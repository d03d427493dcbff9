"""Random programs over graphs: what "the same bits" means, as something that runs.

A *program* is a list of steps (`random_graphs.py`). It is run plainly, and over a store. Each run gives an *account*:
what happened at each step, and the bits of all that the program got. The two accounts must be equal: the same bits, the
same refusals at the same steps (an edit of what was saved, a second backward), and what a program was given earlier
stays whole. Nothing is left in the store when the program is gone. If a device is full of what is in use, backward may
raise `torch.OutOfMemoryError`: up to there the accounts must be equal, and the store can be used afterwards.

`CopyAtPack` copies at pack, and gives a copy back. Its account is equal too, except where autograd itself counts on
shared memory (`Step.needs_shared_memory`). So what is required here could be had by a store that moves everything at
once.

Hypothesis prints a program that fails as a list of steps that can be put into `@example(...)`, over a store that is
opened for it alone.
"""

import gc
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from tests.census import Census
from tests.device.fake import FakeDevice
from tests.gpu.device import make_windows_small
from tests.hooks.random_graphs import BACKWARDS, EDITS, NO_ROOM, OPERATIONS, THIEVES, VIEWS, CopyAtPack, Machine, Step
from tests.inspect_store import inspect
from tests.waiting import until
from tierstore import TierStore, tiered_offload
from tierstore.testing import SimulatedCopies

KIB = 2**10
pytestmark = [
    pytest.mark.timeout(900),  # hypothesis makes a failing program short for up to five minutes
    pytest.mark.usefixtures("validated"),
]

# --- the programs

_NUMBER, _FLAG = st.integers(0, 31), st.booleans()


def _steps(kinds: str, names: Sequence[str] = ("",), views: Sequence[str] = ("whole",)) -> st.SearchStrategy[Step]:
    kind, name, view = (st.sampled_from(each) for each in (kinds.split(), names, views))
    return st.builds(Step, kind, name, view, _NUMBER, _NUMBER, _FLAG)


_COMPUTE = _steps("operation", sorted(OPERATIONS))
_EDIT = _steps("edit", sorted(EDITS), sorted(VIEWS))
_USE = _steps("backward", BACKWARDS)
_STEP = st.one_of(
    *[_COMPUTE] * 4,
    _steps("chain meet"),
    _steps("steal", THIEVES),
    _steps("read", ["sin", "square", "exp"], sorted(VIEWS)),
    *[_EDIT] * 2,
    _steps("forget hide collect clear drop"),
    _steps("look use_gradient settle enter leave"),
    _steps("root"),
    *[_USE] * 2,
)


class Known(NamedTuple):
    """How a store comes to know a graph: the program runs `num_times`, then broken off at `cut`, then once more."""

    num_times: int
    cut: int


_KNOWN = st.one_of(st.just(Known(1, 0)), st.builds(Known, st.just(3), st.integers(1, 12)))


def _programs(max_size: int) -> st.SearchStrategy[list[Step]]:
    """Most are long; what fails is printed as short as it gets."""
    long = st.lists(_STEP, min_size=max_size // 3, max_size=max_size)
    return st.one_of(st.lists(_STEP, min_size=1, max_size=max_size // 3), long, long)


# --- the stores

_ON_HOST: list[dict[str, Any]] = [
    {"host_bytes": 0, "codec": "none"},
    {"host_bytes": 500, "staging_bytes": 300, "codec": "zstd"},
    {"host_bytes": 100 * KIB, "staging_bytes": 150 * KIB},
    {"host_bytes": "64MiB"},
    {"host_bytes": 0, "staging_bytes": 32 * KIB, "codec": "none"},
    {"host_bytes": 10 * KIB, "staging_bytes": 320 * KIB},
    {"host_bytes": 100 * KIB, "staging_bytes": 80 * KIB, "codec": "none"},
]
_ON_ACCELERATOR: list[dict[str, Any]] = [
    {"host_bytes": 0, "codec": "none", "copies": FakeDevice},
    {"host_bytes": 500, "staging_bytes": 300, "copies": FakeDevice, "window_bytes": 10 * KIB},
    {"host_bytes": "64MiB", "copies": partial(FakeDevice, room_bytes=100 * KIB)},
    {"host_bytes": 100 * KIB, "copies": SimulatedCopies},
    {"host_bytes": "64MiB", "staging_bytes": 128 * KIB, "copies": FakeDevice},
    {"host_bytes": 0, "staging_bytes": 320 * KIB, "copies": FakeDevice},
    {"host_bytes": 10 * KIB, "copies": partial(FakeDevice, room_bytes=200 * KIB)},
]
_SCOPES: dict[str, list[dict[str, Any]]] = {
    "host": [{}, {}, {"prefetch": "reverse"}, {"prefetch": "none"}],
    "accelerator": [{"device_bytes": limit} for limit in (0, 3000, 100 * KIB, "auto")],
}


class Bench:
    """Stores that are opened once, as hypothesis runs hundreds of programs over them; anew after one that failed.

    "window_bytes": may be on the way from the device at once, and back.
    """

    def __init__(self, directory: Path, place: str) -> None:
        self.scopes = _SCOPES[place]
        self._directory = directory
        self._options = {"host": _ON_HOST, "accelerator": _ON_ACCELERATOR}[place]
        self.counts: Counter[str] = Counter()
        self.opened = [self.open(which) for which in range(len(self._options))]

    def open(self, which: int) -> tuple[TierStore, SimulatedCopies | None]:
        options = {"disk_bytes": "64MiB", "copies": lambda: None, **self._options[which]}
        copies, window_bytes = options.pop("copies")(), options.pop("window_bytes", None)
        store = TierStore(self._directory, copies=copies, **options)
        if window_bytes is not None:
            make_windows_small(store, window_bytes)
        return store, copies

    def close(self, store: TierStore, copies: SimulatedCopies | None) -> None:
        stats = store.stats()
        self.counts += Counter({name: getattr(stats, name) for name in COUNTED})
        store.close()
        if copies is not None:
            copies.end()

    def check(self, which: int, scope: int, program: Sequence[Step], known: Known) -> None:
        if self.opened:
            opened, self.opened = self.opened, []
            self._check(*opened[which], self.scopes[scope], program, known)
            self.opened = opened
        else:
            store, copies = self.open(which)
            try:
                self._check(store, copies, self.scopes[scope], program, known)
            finally:
                self.close(store, copies)

    def _check(
        self,
        store: TierStore,
        copies: SimulatedCopies | None,
        scope: dict[str, Any],
        program: Sequence[Step],
        known: Known,
    ) -> None:
        expected = {
            len(each): Machine(nullcontext, lambda: None).account(each) for each in (program, program[: known.cut])
        }
        if not any(step.needs_shared_memory for step in program):
            seen, _ = Machine(CopyAtPack, lambda: None).account(program)
            assert _without_reasons(seen) == _without_reasons(expected[len(program)][0])
        for each in [program] * known.num_times + ([program[: known.cut], program] if known.cut else []):
            machine = Machine(lambda: tiered_offload(store, min_bytes=0, **scope), store.flush)
            seen, held = machine.account(each)
            if seen[-1] == NO_ROOM:
                assert copies is not None
                assert copies.num_refused
                assert inspect(store).closed is None
                assert seen[:-1] == expected[len(each)][0][: len(seen) - 1]
            else:
                assert (seen, held) == expected[len(each)]
            self.counts["out of room" if seen[-1] == NO_ROOM else "the same"] += 1
            machine.collect(Step("collect"))
            del machine
            if copies is not None:
                copies.synchronize()
            _until_empty(store)


def _until_empty(store: TierStore) -> None:
    """A read or a write may still run; and `gc.collect` does nothing while another thread collects."""

    def is_empty() -> bool:
        stats = store.stats()
        return not any((stats.live_handles, stats.host_bytes, stats.device_bytes))

    until(is_empty, meanwhile=gc.collect)


def _without_reasons(seen: list[object]) -> list[object]:
    """Of an edit of what was saved and a second backward, hooks may name the other one first."""
    return ["refused" if isinstance(each, str) and each.startswith("refused") else each for each in seen]


COUNTED = ("spilled_bytes", "restored_bytes", "offloaded_bytes", "reloaded_bytes")


@pytest.fixture(scope="module", params=["host", "accelerator"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, census: Census) -> Iterator[Bench]:
    before = set(threading.enumerate())
    bench = Bench(tmp_path_factory.mktemp("drive"), request.param)
    checkpoint(torch.sin, torch.ones(1), use_reentrant=False)  # imports a lot
    every = list(bench.opened)
    yield bench
    for store, copies in every:
        bench.close(store, copies)
    for outcome in ("the same", "out of room"):
        census.count(f"random graphs, {request.param}", outcome, bench.counts[outcome])
    assert not bench.opened or all(bench.counts[name] for name in COUNTED[: 2 if request.param == "host" else 4])
    assert not [thread for thread in threading.enumerate() if thread not in before]


_SETTINGS = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@given(which=st.integers(0, 6), scope=st.integers(0, 3), program=_programs(24), known=_KNOWN)
@settings(_SETTINGS, max_examples=200)
def test_random_graphs_same_account_as_plain(
    bench: Bench, which: int, scope: int, program: list[Step], known: Known
) -> None:
    bench.check(which, scope, program, known)


@pytest.mark.slow
@given(which=st.integers(0, 6), scope=st.integers(0, 3), program=_programs(24), known=_KNOWN)
@settings(_SETTINGS, max_examples=1000)
def test_more_random_graphs_same_account_as_plain(
    bench: Bench, which: int, scope: int, program: list[Step], known: Known
) -> None:
    bench.check(which, scope, program, known)

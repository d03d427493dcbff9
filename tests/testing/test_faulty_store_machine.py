"""The store against a dict, from several threads at once, while writes and reads fail, tear, wait and overtake.

Each step lets some threads do things at the same time, waits for all of them, then compares. An error may
be told only if a fault was injected that it can come of, and no oftener than that; no byte is ever wrong. `Record.move`
refuses illegal moves, which would end the engine.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import itertools
import random
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.inspect_store import inspect
from tests.testing.faulty_step import flush_to_the_end
from tierstore import CorruptDataError, Handle, StorageIOError, StoreClosedError, StoreFullError
from tierstore.testing import Bandwidth, Fails, FaultPlan, FaultyStore, Late, Latency, Rule, Short, Torn

NUM_THREADS = 4
LARGEST_BYTES = 9001 * 4
DISK_BYTES = 4 * 2**20
SIZES = (0, 1, 255, 1024, 1025, 3000, 9001)
BUDGETS = st.sampled_from([0, 1, 4096, 12_004, 40_000])
VERBS = ("put", "put", "get", "get", "get", "prefetch", "drop", "drop", "flush", "stats")
PLANS = {
    "none": FaultPlan(),
    "slow and piecewise": FaultPlan.of(
        Rule(("write", "read"), Latency(0.0005, "exponential")),
        Rule(("pwritev", "preadv"), Short(4096)),
        Rule(("write", "read"), Bandwidth(200e6)),
    ),
    "late": FaultPlan.of(Rule(("write", "read", "discard"), Late(2))),
    "some writes fail": FaultPlan.of(Rule(("write", "pwritev"), Fails(), probability=0.4)),
    "some reads fail": FaultPlan.of(Rule(("read", "preadv"), Fails(), probability=0.4)),
    "the disk is full": FaultPlan.of(Rule("write", Fails(errno.ENOSPC), probability=0.8)),
    "torn": FaultPlan.of(Rule("pwritev", Torn(0), probability=0.3)),
}


def _content(size: int, number: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32) * 31 + number


class Stored:
    """What the model knows of one handle."""

    def __init__(self, handle: Handle, content: torch.Tensor) -> None:
        self.handle = handle
        self.content = content


class FaultyStoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._threads = ThreadPoolExecutor(NUM_THREADS)
        self._numbers = itertools.count(1)
        self._live: dict[int, Stored] = {}
        self._told: Counter[type[Exception]] = Counter()
        self._is_broken = False
        self._store: FaultyStore

    @initialize(host_bytes=BUDGETS, staging_bytes=BUDGETS, codec=st.sampled_from(["none", "auto", "zstd"]))
    def open(self, host_bytes: int, staging_bytes: int, codec: str) -> None:
        self._host_bytes, self._staging_bytes = host_bytes, staging_bytes
        self._told.clear()
        self._store = FaultyStore(
            self._folder.name,
            host_bytes=host_bytes,
            staging_bytes=staging_bytes,
            disk_bytes=DISK_BYTES,
            inline_bytes=4096,
            codec=codec,
        )

    @rule(
        name=st.sampled_from(sorted(PLANS)),
        seed=st.integers(0, 2**30),
        num_actions=st.integers(1, 10),
        then=st.sampled_from(["go on", "go on", "go on", "close"]),
    )
    def act_together(self, name: str, seed: int, num_actions: int, then: str) -> None:
        self._store.faults.set(msgspec.structs.replace(PLANS[name], seed=seed))
        barrier = threading.Barrier(NUM_THREADS)

        def act(number: int) -> None:
            draw = random.Random(f"{seed} {number}")
            barrier.wait(60)
            for _ in range(num_actions):
                self._act(draw.choice(VERBS), draw)

        try:
            for future in [self._threads.submit(act, number) for number in range(NUM_THREADS)]:
                future.result(60)
        except BaseException:
            self._is_broken = True
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            raise
        if then == "close":
            self._close_and_reopen()

    def _close_and_reopen(self) -> None:
        self._store.close()
        for number in list(self._live):
            with pytest.raises(StoreClosedError):
                self._store.get(self._live.pop(number).handle)
        stats = self._store.stats()
        assert (stats.host_bytes, stats.staging_used_bytes, stats.disk_bytes) == (0, 0, 0)
        self.open(self._host_bytes, self._staging_bytes, "none")

    @invariant()
    def holds_what_it_should_and_no_more(self) -> None:
        if not hasattr(self, "_store"):
            return
        if self._store.stats().live_handles != len(self._live):
            gc.collect()  # the frames of an error
        assert self._store.stats().live_handles == len(self._live)
        self._check_stats()
        self._check_told()
        self._check_books()

    def _check_books(self) -> None:
        """Charges and queues are exact, also while jobs run."""
        inside = inspect(self._store)
        with inside.lock:
            inside.ledger.validate()

    def _act(self, verb: str, draw: random.Random) -> None:
        """On any thread."""
        try:
            if verb == "put":
                number = next(self._numbers)
                content = _content(draw.choice(SIZES), number)
                self._live[number] = Stored(self._store.put(content.clone()), content)
            elif verb == "flush":
                self._store.flush()
            elif verb == "stats":
                self._check_stats()
            elif numbers := list(self._live):
                self._act_on(verb, draw.choice(numbers))
        except (StorageIOError, StoreFullError, CorruptDataError) as error:
            self._told[type(error)] += 1

    def _act_on(self, verb: str, number: int) -> None:
        if verb == "drop":
            self._live.pop(number, None)
        elif (stored := self._live.get(number)) is not None:
            if verb == "prefetch":
                self._store.prefetch([stored.handle])
            else:
                assert torch.equal(self._store.get(stored.handle), stored.content)

    def _check_stats(self) -> None:
        stats = self._store.stats()
        assert 0 <= stats.host_bytes <= stats.host_bytes_peak <= self._host_bytes
        assert 0 <= stats.staging_used_bytes <= self._staging_bytes + (NUM_THREADS + 1) * LARGEST_BYTES
        assert 0 <= stats.disk_bytes <= stats.disk_bytes_peak <= DISK_BYTES
        assert stats.lent_bytes >= 0

    def _check_told(self) -> None:
        injected = Counter(self._store.faults.injected)
        failed = sum(injected[f"{operation} Fails"] for operation in ("write", "read", "pwritev", "preadv"))
        assert self._told[StorageIOError] <= failed
        assert injected["write Fails"] or not self._told[StoreFullError]
        assert injected["pwritev Torn"] or not self._told[CorruptDataError]

    def teardown(self) -> None:
        with self._folder:
            try:
                if hasattr(self, "_store") and not self._is_broken:
                    self._end()
            finally:
                if hasattr(self, "_store"):
                    self._store.close()  # ends every wait, and so the threads
                self._threads.shutdown()
            assert list(Path(self._folder.name).iterdir()) == []

    def _end(self) -> None:
        self._store.faults.set(PLANS["none"])
        for number in list(self._live):
            for _ in range(2):  # a read that failed may be told once more
                before = self._told[StorageIOError]
                try:
                    self._act_on("get", number)
                except (StorageIOError, CorruptDataError) as error:
                    self._told[type(error)] += 1
                if self._told[StorageIOError] == before:
                    break
            else:
                raise AssertionError("without faults it could not be read")
        self._live.clear()
        gc.collect()
        flush_to_the_end(self._store)
        stats = self._store.stats()
        assert (stats.live_handles, stats.host_bytes, stats.staging_used_bytes, stats.disk_bytes) == (0, 0, 0, 0)


PROFILE = settings(
    max_examples=18,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # examples are short as they are; to shrink what threads decide takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_store_with_faults_from_several_threads_is_a_dict() -> None:
    run_state_machine_as_test(FaultyStoreMachine, settings=PROFILE)

"""Traces of real steps: nothing is missing, nothing is there twice, and the figures are those of `stats()`."""

import gc
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.programs import LARGE_SIDE, SIDE, bits, in_threads
from tests.inspect_store import inspect
from tierstore import ConfigError, StorageIOError, TierStore, keep_resident, tiered_offload
from tierstore.ledger.counters import STALL_CAUSES
from tierstore.testing import SimulatedCopies
from tierstore.tracing import events
from tierstore.tracing.reader import RecordedTrace, read_trace
from tierstore.tracing.recorder import Recorder
from tierstore.tracing.steps import records_of, steps_of

NBYTES = SIDE * SIDE * 4
T = TypeVar("T")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "step.jsonl"


def of(trace: RecordedTrace, kind: type[T]) -> list[T]:
    return [event for event in trace.events if isinstance(event, kind)]


def chain(length: int = 8, side: int = SIDE) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf, and a loss whose graph saves a tensor of its own for each link."""
    leaf = torch.randn(side, side, requires_grad=True)
    link = leaf
    for _ in range(length):
        link = (link * 1.1).tanh()
    return leaf, link.sum()


def run_step(store: TierStore, file: Path | None, **options: Any) -> torch.Tensor:
    """Everything that has to go to disk is there before backward begins."""
    with tiered_offload(store, min_bytes=0, trace=file, **options):
        leaf, loss = chain()
    store.flush()
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def closed(store: TierStore, file: Path) -> RecordedTrace:
    store.close()
    return read_trace(file)


@pytest.mark.parametrize("host_bytes", [0, 3 * NBYTES, 2**30])
def test_trace_of_steps_has_every_event_and_agrees_with_stats(
    make_store: MakeStore, file: Path, host_bytes: int
) -> None:
    store = make_store(host_bytes=host_bytes, staging_bytes=2 * NBYTES)
    for _ in range(3):
        run_step(store, file)
    stats = store.stats()
    trace = closed(store, file)
    assert trace.is_complete
    assert len(of(trace, events.Pack)) == stats.packed_tensors
    spills, restores = of(trace, events.Spill), of(trace, events.Restore)
    assert sum(spill.nbytes for spill in spills) == stats.spilled_bytes
    assert sum(spill.stored_bytes for spill in spills) == stats.written_bytes
    assert sum(restore.nbytes for restore in restores if restore.wanted) == stats.restored_bytes
    assert sum(restore.read_bytes for restore in restores if restore.wanted) == stats.read_bytes
    assert bool(spills) == (host_bytes < 2**30), "the step was not what it was meant to be"
    for cause in STALL_CAUSES:
        waited = sum(stall.end_ns - stall.began_ns for stall in of(trace, events.Stall) if stall.cause == cause)
        assert waited / 1e9 == pytest.approx(stats.stall_seconds[cause], abs=1e-6)
    assert max(level.host_bytes for level in of(trace, events.Levels)) <= host_bytes


def test_trace_each_saved_tensor_is_packed_asked_for_and_let_go_of_in_that_order(store: TierStore, file: Path) -> None:
    run_step(store, file)
    store.flush()
    trace = read_trace(file)
    assert not trace.is_complete, "the store is open, and the file has all so far"
    assert steps_of(trace)[0].is_whole
    packs = {(pack.graph, pack.index): pack for pack in of(trace, events.Pack)}
    unpacks = {(unpack.graph, unpack.index): unpack for unpack in of(trace, events.Unpack)}
    releases = {(release.graph, release.index): release for release in of(trace, events.Release)}
    assert packs.keys() == unpacks.keys() == releases.keys()
    assert packs.keys() == {(event.graph, event.index) for event in of(trace, events.Booked)}, "everything had to leave"
    assert len(packs) == len(of(trace, events.Pack)) == 8
    for name, pack in packs.items():
        assert pack.began_ns <= pack.end_ns <= unpacks[name].began_ns <= unpacks[name].end_ns <= releases[name].at_ns
    assert [pack.index for pack in of(trace, events.Pack)] == list(range(8))
    assert sorted(unpacks, key=lambda name: unpacks[name].began_ns) == sorted(packs, reverse=True)
    for kind in (events.Spill, events.Restore):
        assert_jobs_take_turns(of(trace, kind))
    written = {spill.record: spill.end_ns for spill in of(trace, events.Spill)}
    freed = {event.record: event.at_ns for event in of(trace, events.Freed)}
    for restore in of(trace, events.Restore):
        assert written[restore.record] <= freed[restore.record] <= restore.queued_ns


def assert_jobs_take_turns(jobs: Sequence[events.Spill | events.Restore]) -> None:
    """They are queued, then begun, then over, one at a time in a lane."""
    assert jobs
    last_of_lane: dict[int, int] = {}
    for job in sorted(jobs, key=lambda job: job.began_ns):
        assert job.queued_ns <= job.began_ns < job.end_ns
        assert last_of_lane.get(job.lane, 0) <= job.began_ns
        last_of_lane[job.lane] = job.end_ns
        assert job.drive_seconds is None or 0 <= job.drive_seconds <= (job.end_ns - job.began_ns) / 1e9


def test_trace_tells_what_a_replay_needs_of_each_pack(make_store: MakeStore, file: Path) -> None:
    store = make_store()
    with tiered_offload(store, min_bytes=128, prefetch="reverse", trace=file):
        wide = torch.randn(SIDE, 3 * SIDE, requires_grad=True).double().tanh()
        one, other, _ = wide.chunk(3, -1)
        (one.exp() * other.exp()).sum().backward()
    trace = closed(store, file)
    scope = of(trace, events.Scope)[0]
    assert (scope.min_bytes, scope.prefetch, scope.thread_name) == (128, "reverse", threading.current_thread().name)
    assert trace.header.store.host_bytes == 0
    assert (trace.header.store.codec, trace.header.store.is_connected) == ("none", False)
    assert trace.header.machine.num_cores >= 1
    packs = of(trace, events.Pack)
    assert packs[0].shape == (SIDE, 3 * SIDE)
    assert {(pack.dtype, pack.device) for pack in packs} == {("float64", "cpu")}
    assert [pack.node for pack in packs] == sorted(pack.node for pack in packs)
    assert packs[0].storage_bytes == 3 * SIDE * SIDE * 8


@pytest.mark.parametrize("host_bytes", [0, 2**30])
def test_trace_views_of_one_storage_are_one_record_whether_registered_or_not(
    make_store: MakeStore, file: Path, host_bytes: int
) -> None:
    store = make_store(host_bytes=host_bytes, staging_bytes=4 * NBYTES)
    with tiered_offload(store, min_bytes=0, trace=file):
        whole = torch.randn(SIDE, 3 * SIDE, requires_grad=True) * 2
        loss = sum(part.square().sum() for part in whole.chunk(3, -1))
    del whole
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    trace = closed(store, file)
    records = records_of(trace.events)
    views = [pack for pack in of(trace, events.Pack) if pack.view_bytes == NBYTES]
    assert len(views) == 3
    assert len({records[pack.graph, pack.index] for pack in views}) == 1
    booked = {(event.graph, event.index, event.record) for event in of(trace, events.Booked)}
    assert booked <= {(pack.graph, pack.index, views[0].key) for pack in views}


def test_trace_does_not_change_a_bit_nor_what_is_kept(make_store: MakeStore, file: Path) -> None:
    found = []
    for trace in (file, None):
        store = make_store()
        torch.manual_seed(0)
        gradient = run_step(store, trace)
        with tiered_offload(store, min_bytes=0, trace=trace), keep_resident():
            _, loss = chain(2)
        loss.backward()
        stats = store.stats()
        found.append((bits(gradient), stats.kept_bytes, stats.packed_bytes))
        assert stats.kept_bytes["selected out"] == 2 * NBYTES
    assert found[0] == found[1]


def test_trace_of_an_accelerator_has_every_copy(make_store: MakeStore, file: Path) -> None:
    with SimulatedCopies() as copies:
        store = make_store(copies=copies)
        run_step(store, file)
        stats = store.stats()
        trace = closed(store, file)
    assert sum(copy.nbytes for copy in of(trace, events.Offload)) == stats.offloaded_bytes > 0
    assert sum(copy.nbytes for copy in of(trace, events.Reload)) == stats.reloaded_bytes > 0


def test_trace_scope_that_fails_is_told_and_its_graph_is_gone(store: TierStore, file: Path) -> None:
    with pytest.raises(ZeroDivisionError), tiered_offload(store, min_bytes=0, trace=file):
        chain()[1].add_(1 // 0)
    gc.collect()
    run_step(store, file)
    trace = closed(store, file)
    assert [end.failed for end in of(trace, events.ScopeEnd)] == [True, False]
    graphs = {pack.graph for pack in of(trace, events.Pack)}
    assert {gone.graph for gone in of(trace, events.Gone)} == graphs
    assert Counter((release.graph, release.index) for release in of(trace, events.Release)) == Counter(
        (pack.graph, pack.index) for pack in of(trace, events.Pack)
    )


def test_trace_graph_dropped_before_its_writes_tells_what_was_cancelled(store: TierStore, file: Path) -> None:
    go_on = inspect(store).stall()
    for _ in range(5):
        with tiered_offload(store, min_bytes=0, trace=file):
            chain(4, LARGE_SIDE)
    go_on.set()
    store.flush()
    stats = store.stats()
    cancelled = [event for event in of(closed(store, file), events.Cancelled) if event.what == "spill"]
    assert sum(event.nbytes for event in cancelled) == stats.cancelled_bytes > 0


def test_trace_retained_graph_is_one_step_that_is_asked_twice_and_double_backward_two(
    store: TierStore, file: Path
) -> None:
    with tiered_offload(store, min_bytes=0, trace=file):
        _, loss = chain(3)
    store.flush()
    loss.backward(retain_graph=True)
    loss.backward()
    with tiered_offload(store, min_bytes=0, trace=file):
        leaf, loss = chain(3)
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        store.flush()
        grad.square().sum().backward()
    del loss, grad
    gc.collect()
    trace = closed(store, file)
    step, first, second = steps_of(trace)[:3]
    assert step.is_whole
    assert Counter(unpack.index for unpack in step.unpacks) == {0: 2, 1: 2, 2: 2}
    assert sum(release.graph == step.graph for release in of(trace, events.Release)) == 3
    assert first.packs
    assert second.packs
    assert len(of(trace, events.Pack)) == len(of(trace, events.Release))


def test_trace_of_threads_tells_them_apart(make_store: MakeStore, file: Path) -> None:
    store = make_store(staging_bytes=4 * NBYTES)
    barrier = threading.Barrier(3)

    def work() -> None:
        threading.current_thread().name = f"trainer-{barrier.wait(30)}"
        for _ in range(3):
            run_step(store, file)

    in_threads(*[work] * 3)
    packed = store.stats().packed_tensors
    trace = closed(store, file)
    assert len(of(trace, events.Pack)) == packed == 3 * 3 * 8
    names = {scope.thread: scope.thread_name for scope in of(trace, events.Scope)}
    assert sorted(names[step.thread] for step in steps_of(trace)) == sorted(f"trainer-{n % 3}" for n in range(9))
    for step in steps_of(trace):
        assert {pack.thread for pack in step.packs} == {step.thread}
        assert len(step.unpacks) == 8


def test_trace_other_file_while_a_graph_is_alive_refused_then_allowed(
    store: TierStore, file: Path, tmp_path: Path
) -> None:
    with tiered_offload(store, min_bytes=0, trace=file):
        _, loss = chain()
    with pytest.raises(ConfigError, match="still being recorded"):
        tiered_offload(store, trace=tmp_path / "other.jsonl")
    loss.backward()
    run_step(store, tmp_path / "other.jsonl")
    assert read_trace(file).is_complete
    run_step(store, file)
    store.close()
    assert [len(steps_of(read_trace(each))) for each in (file, tmp_path / "other.jsonl")] == [2, 1]


def test_store_trace_records_every_scope_inside_and_ends_with_the_block(store: TierStore, file: Path) -> None:
    with store.trace(file):
        run_step(store, None)
        run_step(store, None)
        store.stats()  # takes in what finalizers left
    trace = read_trace(file)
    assert trace.is_complete
    last = of(trace, events.Levels)[-1]
    assert (last.uncharged_bytes, last.host_bytes, last.staging_bytes, last.disk_bytes) == (0, 0, 0, 0)
    assert len(steps_of(trace)) == 2
    run_step(store, None)
    assert read_trace(file) == trace


def test_graph_that_two_traces_see_the_beginning_and_the_end_of_is_in_the_second_too(
    store: TierStore, file: Path
) -> None:
    second_file = file.with_name("second.jsonl")
    with store.trace(file), tiered_offload(store, min_bytes=0):
        _, first = chain(2, LARGE_SIDE)
    with store.trace(second_file):
        with tiered_offload(store, min_bytes=0):
            _, second = chain(3, LARGE_SIDE)
        (first + second).backward()
        del first, second
        store.stats()  # takes in what finalizers left
    first_trace = read_trace(file)
    assert first_trace.is_complete
    assert not of(first_trace, events.Unpack)
    packs = of(first_trace, events.Pack)
    second_trace = read_trace(second_file)
    second_packs = of(second_trace, events.Pack)
    assert {pack.graph for pack in packs} == {pack.graph for pack in second_packs}, "it was not one graph"
    assert [pack.index for pack in (*packs, *second_packs)] == [0, 1, 2, 3, 4]
    assert [gone.graph for gone in of(second_trace, events.Gone)] == [packs[0].graph]
    booked = {(event.graph, event.index) for event in of(second_trace, events.Booked)}
    assert all((pack.graph, pack.index) in booked or pack.record is not None for pack in second_packs)


def test_trace_of_a_full_disk_takes_nothing_down_any_more(make_store: MakeStore) -> None:
    """Neither in scopes that are entered later nor in one that was there already: nobody would take it away."""
    store = make_store()
    traced = run_step(store, Path("/dev/full"))
    torch.manual_seed(0)
    assert bits(traced) == bits(run_step(make_store(), None))
    for _ in range(2):
        with tiered_offload(store, min_bytes=0, trace="/dev/full"):
            run_step(store, Path("/dev/full"))
            recorder = inspect(store).recorder
            assert recorder is not None
            recorder.flush(60)
            recorder._thread.join(60)
            assert recorder.is_over()
            run_two_steps(store)  # what was taken down before is gone after these, and has told so
            before = num_held(recorder)
            run_two_steps(store)
            assert num_held(recorder) == before
    with pytest.raises(StorageIOError, match="No space left on device") as caught:
        store.close()
    assert caught.value.place == "/dev/full"
    assert isinstance(caught.value.__cause__, OSError)
    store.close()


def run_two_steps(store: TierStore) -> None:
    _, loss = chain()
    loss.backward()
    del loss
    run_step(store, Path("/dev/full"))


def num_held(recorder: Recorder) -> tuple[int, int, int]:
    """Of events, graphs and orders."""
    return len(recorder.waiting), len(recorder._graphs), recorder._orders.qsize()


def test_store_trace_of_a_full_disk_tells_at_the_end_of_the_block(store: TierStore) -> None:
    with pytest.raises(StorageIOError, match="cut short"), store.trace("/dev/full"):
        run_step(store, None)
    run_step(store, None)

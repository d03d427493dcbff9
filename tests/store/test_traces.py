"""The life of a trace beside its store: begun, refused, ended by close, by exit, by nobody; forked; written by hand."""

import gc
import subprocess
import textwrap
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.inspect_store import inspect
from tests.processes import python
from tierstore import ConfigError, TierStore, tiered_offload
from tierstore.tracing import recorder as recording
from tierstore.tracing.events import Cancelled, End, Lost, Pack, Release, Unpack
from tierstore.tracing.reader import read_trace

ELEMENTS = 2**16


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def saved_by_a_graph() -> torch.Tensor:
    return torch.randn(ELEMENTS, requires_grad=True).exp().sum()


def test_trace_to_unusable_path_refused_at_the_start_and_nothing_is_recorded(store: TierStore, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "trace.jsonl"
    with pytest.raises(ConfigError, match="No such file or directory"):
        tiered_offload(store, trace=missing)
    with pytest.raises(ConfigError, match="No such file or directory"), store.trace(missing):
        pass
    assert inspect(store).observer is None


def test_store_traced_already_refused(store: TierStore, file: Path) -> None:
    with store.trace(file):
        with pytest.raises(ConfigError, match="already"), store.trace(file):
            pass
        store.flush()
        assert not read_trace(file).is_complete


def test_trace_of_a_relative_path_goes_on_there_after_chdir(
    store: TierStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    scope = tiered_offload(store, min_bytes=0, trace=file.name)
    monkeypatch.chdir("/")
    with scope:
        saved_by_a_graph()
    store.close()
    assert read_trace(file).is_complete


def test_trace_tells_of_reads_that_are_let_go_of_before_they_begin(store: TierStore, file: Path) -> None:
    with store.trace(file):
        handle = store.put(torch.ones(ELEMENTS))
        store.flush()
        go_on = inspect(store).stall()
        store.prefetch([handle])
        del handle
        assert store.stats().live_handles == 0
        go_on.set()
        store.flush()
    assert [event.what for event in read_trace(file).events if isinstance(event, Cancelled)] == ["restore"]


def test_trace_of_a_store_that_nobody_closes_is_written_and_its_thread_ends(store_directory: Path, file: Path) -> None:
    store = TierStore(store_directory, host_bytes=0, disk_bytes="1GiB")
    with tiered_offload(store, min_bytes=0, trace=file):
        loss = saved_by_a_graph()
    loss.backward()
    (writer,) = [thread for thread in threading.enumerate() if thread.name == "tierstore-trace"]
    del loss, store
    gc.collect()
    writer.join(60)
    assert not writer.is_alive()
    counts = Counter(type(event) for event in read_trace(file).events)
    assert counts[Pack] == counts[Unpack] == counts[Release] > 0


def test_trace_slower_than_training_leaves_out_events_and_says_how_many(
    store: TierStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_WAITING_EVENTS", 0)
    with store.trace(file), tiered_offload(store, min_bytes=0):
        loss = saved_by_a_graph()
    del loss
    trace = read_trace(file)
    assert sum(event.num_events for event in trace.events if isinstance(event, Lost)) > 3
    assert isinstance(trace.events[-1], (Lost, End))
    assert not [event for event in trace.events if isinstance(event, Pack)]


def run_program(program: str, file: Path, drive: Path) -> subprocess.CompletedProcess[str]:
    begin = f"""
        import os, shutil, torch
        from tierstore import TierStore, tiered_offload
        DRIVE, FILE = {str(drive)!r}, {str(file)!r}
        store = TierStore(DRIVE, host_bytes=0, disk_bytes="1GiB", codec="none")
        def forward():
            with tiered_offload(store, min_bytes=0, trace=FILE):
                return torch.randn({ELEMENTS}, requires_grad=True).exp().sum()
    """
    source = textwrap.dedent(begin) + textwrap.dedent(program)
    return python("-W", "error", "-c", source)


def test_interpreter_exit_with_a_living_graph_writes_the_trace_to_its_end(store_directory: Path, file: Path) -> None:
    done = run_program("loss = forward()", file, store_directory)
    assert (done.returncode, done.stderr) == (0, "")
    trace = read_trace(file)
    assert [event.reason for event in trace.events if isinstance(event, End)] == ["the interpreter exits"]
    assert [event for event in trace.events if isinstance(event, Pack)]


def test_forked_child_adds_nothing_and_the_parent_goes_on(store_directory: Path, file: Path) -> None:
    program = """
        loss = forward()
        hold, let_go = os.pipe()
        child = os.fork()
        if not child:
            del loss
            os.close(let_go)
            os.read(hold, 1)
            os._exit(0)
        loss.backward()
        store.flush()
        store.close()
        shutil.copy(FILE, FILE + ".first")
        with TierStore(DRIVE, host_bytes=0, disk_bytes="1GiB") as other, other.trace(FILE):
            pass  # the child, which lives, does not hold the lock
    """
    done = run_program(program, file, store_directory)
    assert done.returncode == 0, done.stderr
    trace = read_trace(file.with_name(f"{file.name}.first"))
    assert trace.is_complete
    counts = Counter(type(event).__name__ for event in trace.events)
    assert counts["Pack"] == counts["Unpack"] == counts["Release"]
    assert counts["End"] == 1

"""A trace of a connected store: the transfers are there, though only the daemon knows what they took inside."""

from pathlib import Path

import torch

from tests.daemon.conftest import StartDaemon
from tierstore import TierStore, tiered_offload
from tierstore.tracing.events import Restore, Spill
from tierstore.tracing.reader import read_trace
from tierstore.tracing.steps import steps_of
from tierstore.tracing.summary import summarize


def test_trace_of_a_connected_store_agrees_with_stats(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon(codec="none")
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        with tiered_offload(store, min_bytes=0, trace=tmp_path / "step.jsonl"):
            loss = (torch.randn(256, 256, requires_grad=True) * 2).exp().tanh().sum()
        store.flush()
        loss.backward()
        stats = store.stats()
    trace = read_trace(tmp_path / "step.jsonl")
    settings = trace.header.store
    assert (settings.is_connected, settings.codec, settings.place) == (True, None, str(daemon.socket))
    spills = [event for event in trace.events if isinstance(event, Spill)]
    restores = [event for event in trace.events if isinstance(event, Restore)]
    assert sum(spill.nbytes for spill in spills) == stats.spilled_bytes > 0
    assert sum(restore.nbytes for restore in restores) == stats.restored_bytes > 0
    assert {job.drive_seconds for job in (*spills, *restores)} == {None}
    (step,) = steps_of(trace)
    assert summarize(step, trace.header).written.codec_seconds == 0

"""A process under `TIERSTORE_TUNE`: other settings, a trace, and an end after some steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tierstore import TierStore, offload_module, tiered_offload
from tierstore.errors import ConfigError
from tierstore.store.trial import VARIABLE, TrialEndedError, trial_of_process
from tierstore.testing import SimulatedCopies
from tierstore.tracing.events import Computed, Gone
from tierstore.tracing.reader import read_trace
from tierstore.tuning.recording import read_recording

MIB = 2**20
BeginTrial = Callable[..., Path]


def _step(store: TierStore, **options: int) -> None:
    with tiered_offload(store, min_bytes=0, **options):  # type: ignore[arg-type]
        tensor = torch.randn(64, 64, requires_grad=True)
        loss = tensor.exp().exp().sum()
    loss.backward()


def test_trial_gives_store_and_scope_its_settings(begin_trial: BeginTrial, make_store: MakeStore) -> None:
    folder = begin_trial(
        store={"host_bytes": 3 * MIB, "staging_bytes": 20 * MIB, "codec": "zstd:1", "io_depth": 7, "inline_bytes": 9},
        offload={"prefetch": "reverse", "lookahead_bytes": 5 * MIB},
    )
    store = make_store(host_bytes=MIB, codec="none")
    for _ in range(3):
        _step(store)
    store.close()
    recording = read_recording(folder)
    found = recording.settings
    assert (found.host_bytes, found.staging_bytes, found.codec) == (3 * MIB, 20 * MIB, "zstd:1")
    assert (found.prefetch, found.lookahead_bytes) == ("reverse", 5 * MIB)
    assert (found.io_depth, found.inline_bytes) == (7, 9)


def test_trial_ends_at_a_scope_after_its_graphs_are_whole_and_the_program_s_lookahead_gives_way(
    begin_trial: BeginTrial, make_store: MakeStore
) -> None:
    folder = begin_trial(num_graphs=2, offload={"lookahead_bytes": None})
    store = make_store(host_bytes=MIB)
    for _ in range(3):
        _step(store, lookahead_bytes=7)
    with pytest.raises(TrialEndedError) as ended:
        _step(store)
    assert isinstance(ended.value, SystemExit)
    assert ended.value.code == 0
    store.close()
    (trace,) = folder.glob("*.jsonl")
    assert read_trace(trace).is_complete
    assert read_recording(folder).settings.lookahead_bytes is None


def test_trial_of_module_with_a_scope_for_each_block_does_not_end_within_a_forward(
    begin_trial: BeginTrial, make_store: MakeStore
) -> None:
    begin_trial(num_graphs=1)
    store = make_store()
    blocks = [offload_module(nn.Tanh(), store=store, min_bytes=0) for _ in range(5)]

    def forward() -> torch.Tensor:
        tensor = torch.randn(64, 64, requires_grad=True)
        for block in blocks:
            tensor = block(tensor)
        return tensor.sum()

    forward().backward()
    with pytest.raises(TrialEndedError):
        forward()


def test_trial_of_program_with_a_store_for_each_step_ends(begin_trial: BeginTrial, store_directory: Path) -> None:
    folder = begin_trial(num_graphs=2)

    def step() -> None:
        with TierStore(store_directory, host_bytes=0, disk_bytes="1GiB") as store:
            _step(store)

    for _ in range(3):
        step()
    with pytest.raises(TrialEndedError):
        step()
    assert len(list(folder.glob("*.jsonl"))) == 4


@pytest.mark.parametrize("content", [None, b"{", b'{"folder": "/x", "num_graphs": 1, "sore": {}}'])
def test_trial_of_a_plan_that_is_none_is_refused(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store_directory: Path
) -> None:
    file = tmp_path / "plan"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv(VARIABLE, str(file))
    trial_of_process.cache_clear()
    with pytest.raises(ConfigError, match=VARIABLE):
        TierStore(store_directory)
    monkeypatch.delenv(VARIABLE)
    trial_of_process.cache_clear()


def test_trial_on_an_accelerator_waits_for_it_and_tells_what_its_graphs_took(
    begin_trial: BeginTrial, make_store: MakeStore
) -> None:
    folder = begin_trial(num_graphs=3, offload={"device_bytes": 4096})
    with SimulatedCopies() as copies:
        store = make_store(copies=copies)
        for _ in range(4):
            _step(store)
        with pytest.raises(TrialEndedError):
            _step(store)
        store.close()
    recording = read_recording(folder)
    computed = [event for event in recording.trace.events if isinstance(event, Computed)]
    gone = [event for event in recording.trace.events if isinstance(event, Gone)]
    assert [event.graph for event in computed] == [event.graph for event in gone]
    assert all(told.at_ns > went.at_ns for told, went in zip(computed, gone, strict=True))
    assert recording.scope.device_bytes == 4096
    for event in computed:
        assert event.forward_seconds > 0
        assert event.backward_seconds > 0
        assert event.in_bytes <= event.out_bytes == 2 * 64 * 64 * 4

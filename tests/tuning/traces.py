"""Traces of steps that were never trained."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tierstore.store.trial import TracedStore
from tierstore.tracing.events import (
    End,
    Event,
    Gone,
    Header,
    Machine,
    Pack,
    Release,
    Scope,
    ScopeEnd,
    StoreSettings,
    Unpack,
)
from tierstore.tuning.settings import TrialSettings

_SECOND = 1_000_000_000
_NUM_STEPS, _NUM_TENSORS = 4, 8


def graph_of_steps(
    folder: Path, pid: int, settings: TrialSettings, step_seconds: float, tensor_bytes: int = 8 * 2**20
) -> None:
    """The trace that a process leaves whose steps take so long; each saves eight tensors, and never waits."""
    store = StoreSettings(
        "/nvme",
        False,
        settings.host_bytes,
        settings.staging_bytes,
        0,
        settings.codec,
        settings.inline_bytes,
        True,
        6,
        6,
        "O_DIRECT",
        settings.io_depth,
    )
    reach = settings.lookahead_bytes
    if reach is None:
        reach = settings.host_bytes + settings.staging_bytes
    events: list[Event] = [Header("tierstore trace", 1, 0, 0.0, pid, store, Machine("x", 2, 0, {}))]
    for number in range(_NUM_STEPS):
        began, lasts = round(number * step_seconds * _SECOND), round(step_seconds * _SECOND)
        events += _step(number, began, lasts, tensor_bytes, settings.prefetch, reach)
    events.append(End(0, "ended"))
    (folder / f"{pid}-1.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    (folder / f"{pid}-1.json").write_bytes(msgspec.json.encode(TracedStore(pid, f"{pid}-1.jsonl", 2)))


def _step(graph: int, began: int, lasts: int, tensor_bytes: int, prefetch: str, reach: int) -> list[Event]:
    """Forward is half of it."""
    part = lasts // (2 * _NUM_TENSORS + 2)
    events: list[Event] = [Scope(began, 7, "main", graph, 0, 0, prefetch, reach, False)]
    for index in range(_NUM_TENSORS):
        at, key = began + (index + 1) * part, graph * _NUM_TENSORS + index
        pack = Pack(at, at, 7, graph, graph, index, key, key, index, key, 0, tensor_bytes, 1, "float32", "cpu", (1,))
        events.append(pack)
    events.append(ScopeEnd(began + lasts // 2, 7, graph, False))
    for index in reversed(range(_NUM_TENSORS)):
        at = began + lasts - (index + 1) * part
        events += [Unpack(at, at, 7, graph, index), Release(at + 1, graph, index)]
    return [*events, Gone(began + lasts, graph)]

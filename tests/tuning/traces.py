"""Traces of steps that were never trained."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tierstore.store.trial import TracedStore
from tierstore.tracing.events import (
    FORMAT,
    VERSION,
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
    folder: Path, pid: int, settings: TrialSettings, step_seconds: float, device: str = "cpu", device_bytes: int = 0
) -> None:
    """The trace that a process leaves whose steps take so long; each saves eight tensors of 8 MiB, and never waits."""
    store = StoreSettings(
        "/nvme",
        False,
        settings.host_bytes,
        settings.staging_bytes,
        0,
        settings.codec,
        settings.inline_bytes,
        True,
        "O_DIRECT",
        settings.io_depth,
    )
    reach = settings.lookahead_bytes
    if reach is None:
        reach = settings.host_bytes + settings.staging_bytes
    scope = Scope(0, 7, "main", 0, 0, device_bytes, settings.prefetch, reach, False)
    events: list[Event] = [Header(FORMAT, VERSION, 0, 0.0, pid, store, Machine("x", 2, 0, {}))]
    for number in range(_NUM_STEPS):
        began, lasts = round(number * step_seconds * _SECOND), round(step_seconds * _SECOND)
        events += _step(msgspec.structs.replace(scope, at_ns=began, scope=number), lasts, device)
    events.append(End(0, "ended"))
    (folder / f"{pid}-1.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    (folder / f"{pid}-1.json").write_bytes(msgspec.json.encode(TracedStore(pid, f"{pid}-1.jsonl")))


def _step(scope: Scope, lasts: int, device: str) -> list[Event]:
    """Forward is half of it."""
    graph, began, part = scope.scope, scope.at_ns, lasts // (2 * _NUM_TENSORS + 2)
    events: list[Event] = [scope]
    for index in range(_NUM_TENSORS):
        at, key = began + (index + 1) * part, graph * _NUM_TENSORS + index
        view = (8 * 2**20, 1, "float32", device, (1,))
        events += [Pack(at, at, 7, graph, graph, index, key, key, index, key, 0, *view)]
    events.append(ScopeEnd(began + lasts // 2, 7, graph, False))
    for index in reversed(range(_NUM_TENSORS)):
        at = began + lasts - (index + 1) * part
        events += [Unpack(at, at, 7, graph, index), Release(at + 1, graph, index)]
    return [*events, Gone(began + lasts, graph)]

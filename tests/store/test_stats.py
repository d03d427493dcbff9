"""The snapshot: complete, immutable, and fit for JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tierstore import StoreStats, TierStore
from tierstore.rules.counters import KEPT_REASONS, STALL_CAUSES

PROMISED = {
    "live_handles", "device_bytes", "host_bytes", "host_bytes_peak", "staging_bytes", "lent_bytes", "disk_bytes",
    "disk_bytes_peak", "packed_tensors", "packed_bytes", "deduplicated_bytes", "kept_bytes", "spilled_bytes",
    "written_bytes", "restored_bytes", "read_bytes", "cancelled_bytes", "forwarded_bytes", "prefetch_hits",
    "prefetch_late", "prefetch_misses", "stall_seconds",
}  # fmt: skip


def test_snapshot_has_every_promised_field(store: TierStore) -> None:
    stats = store.stats()
    assert isinstance(stats, StoreStats)
    assert {field.name for field in dataclasses.fields(stats)} >= PROMISED
    assert set(stats.kept_bytes) == set(KEPT_REASONS)
    assert set(stats.stall_seconds) == set(STALL_CAUSES)
    documented = StoreStats.__doc__ or ""
    assert all(f"{field.name}:" in documented for field in dataclasses.fields(stats))


def test_snapshot_of_a_new_store_is_all_zero(make_store: MakeStore) -> None:
    store = make_store(staging_bytes="1MiB")
    stats = store.stats()
    numbers = {name: value for name, value in stats.as_dict().items() if isinstance(value, (int, float))}
    assert numbers.pop("staging_bytes") == 2**20 + inspect(store).disk.scratch_bytes
    assert numbers.pop("open_seconds") > 0
    assert numbers.pop("resident_bytes") > numbers.pop("allocator_free_bytes", 0)
    assert set(numbers.values()) == {0}
    assert not any(stats.kept_bytes.values())
    assert not any(stats.stall_seconds.values())


def test_snapshot_cannot_be_changed(store: TierStore) -> None:
    stats = store.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.host_bytes = 5
    for mapping in (stats.kept_bytes, stats.stall_seconds):
        with pytest.raises(TypeError):
            mapping["small"] = 5


def test_snapshot_does_not_change_with_the_store(store: TierStore) -> None:
    before = store.stats()
    copied = before.as_dict()
    handle = store.put(torch.randn(30_000))
    inspect(store).residency.count_kept("small", 5)
    store.flush()
    store.get(handle)
    assert before.as_dict() == copied
    after = store.stats()
    assert after.packed_tensors == 1
    assert after.kept_bytes["small"] == 5
    assert sum(count for counts in after.codec_choices.values() for count in counts.values()) == 1


def test_snapshot_goes_through_json(store: TierStore) -> None:
    handle = store.put(torch.randn(30_000))
    store.flush()
    values = store.stats().as_dict()
    assert json.loads(json.dumps(values)) == values
    assert set(values) == {field.name for field in dataclasses.fields(StoreStats)}
    del handle


def test_totals_only_grow(store: TierStore) -> None:
    now = {
        "live_handles", "device_bytes", "host_bytes", "staging_used_bytes", "lent_bytes", "disk_bytes",
        "resident_bytes", "allocator_free_bytes",
    }  # fmt: skip
    previous = store.stats()
    handles = []
    for i in range(20):
        handles.append(store.put(torch.randn(1 + 1000 * i)))
        if i % 3:
            store.get(handles[i // 2])
        if i % 5 == 4:
            store.flush()
            handles[i // 5] = handles[-1]
        stats = store.stats()
        for name, value in stats.as_dict().items():
            if isinstance(value, (int, float)) and name not in now:
                assert value >= getattr(previous, name), name
        previous = stats

"""The snapshot: complete, immutable, and fit for JSON."""

import dataclasses
import json
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.conftest import MakeStore
from tests.inspect_store import inspect
from tierstore import ConfigError, StoreStats, TierStore, tiered_offload
from tierstore.ledger.counters import KEPT_REASONS, STALL_CAUSES
from tierstore.testing import SimulatedCopies

PROMISED = {
    "live_handles", "device_bytes", "host_bytes", "host_bytes_peak", "staging_bytes", "lent_bytes", "disk_bytes",
    "disk_bytes_peak", "packed_tensors", "packed_bytes", "deduplicated_bytes", "kept_bytes", "spilled_bytes",
    "written_bytes", "restored_bytes", "read_bytes", "cancelled_bytes", "forwarded_bytes", "prefetch_hits",
    "prefetch_late", "prefetch_misses", "stall_seconds",
}  # fmt: skip


def test_snapshot_has_every_promised_field_and_cannot_be_changed(store: TierStore) -> None:
    stats = store.stats()
    assert isinstance(stats, StoreStats)
    assert {field.name for field in dataclasses.fields(stats)} >= PROMISED
    assert set(stats.kept_bytes) == set(KEPT_REASONS)
    assert set(stats.stall_seconds) == set(STALL_CAUSES)
    documented = StoreStats.__doc__ or ""
    assert all(f"{field.name}:" in documented for field in dataclasses.fields(stats))
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.host_bytes = 5
    for mapping in (stats.kept_bytes, stats.stall_seconds):
        with pytest.raises(TypeError):
            mapping["small"] = 5


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


def test_snapshot_does_not_change_with_the_store_and_goes_through_json(store: TierStore) -> None:
    before = store.stats()
    copied = before.as_dict()
    handle = store.put(torch.randn(30_000))
    inspect(store).residency.books.newly_kept.adder("small")(5)
    store.flush()
    store.get(handle)
    assert before.as_dict() == copied
    after = store.stats()
    values = after.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert set(values) == {field.name for field in dataclasses.fields(StoreStats)}
    assert after.packed_tensors == 1
    assert after.kept_bytes["small"] == 5
    assert sum(count for counts in after.codec_choices.values() for count in counts.values()) == 1


def _used(store: TierStore) -> None:
    handle = store.put(torch.randn(2**18))
    store.flush()
    store.get(handle)


def test_metrics_are_flat_floats_with_names_that_stay(make_store: MakeStore) -> None:
    store = make_store(host_bytes=0)
    empty = store.stats().as_metrics()
    _used(store)
    metrics = store.stats().as_metrics()
    assert sorted(metrics) == sorted(empty)
    assert sorted(name.removeprefix("tierstore/") for name in metrics) == METRICS
    assert all(type(value) is float for value in metrics.values())
    assert metrics["tierstore/spilled_gib"] == metrics["tierstore/restored_gib"] == 2**20 / 2**30
    assert metrics["tierstore/stall_seconds"] == pytest.approx(
        metrics["tierstore/stall_pack_seconds"] + metrics["tierstore/stall_unpack_seconds"]
    )


METRICS = [
    "cancelled_gib", "deduplicated_gib", "device_gib", "disk_gib", "disk_peak_gib", "forwarded_gib", "host_gib",
    "host_peak_gib", "kept_gib", "lent_gib", "live_handles", "offloaded_gib", "packed_gib", "prefetch_hits",
    "prefetch_late", "prefetch_missed", "read_gib", "reloaded_gib", "resident_gib", "restored_gib", "returned_gib",
    "spilled_gib", "staging_gib", "stall_pack_seconds", "stall_seconds", "stall_unpack_seconds", "written_gib",
]  # fmt: skip


def test_metrics_since_a_snapshot_are_differences_of_totals_alone(make_store: MakeStore) -> None:
    store = make_store(host_bytes=0)
    _used(store)
    before = store.stats()
    handle = store.put(torch.randn(2**18))
    store.flush()
    stats = store.stats()
    since, whole = stats.as_metrics(before), stats.as_metrics()
    assert whole["tierstore/spilled_gib"] == 2 * since["tierstore/spilled_gib"] == 2 * 2**20 / 2**30
    assert since["tierstore/restored_gib"] == 0
    for now in ("disk_gib", "disk_peak_gib", "live_handles"):
        assert since[f"tierstore/{now}"] == whole[f"tierstore/{now}"] > 0
    del handle
    with pytest.raises(ConfigError, match="earlier StoreStats"):
        stats.as_metrics(whole)  # type: ignore[arg-type]


def test_summary_is_one_line_of_what_was_stored(make_store: MakeStore) -> None:
    store = make_store(host_bytes=0, staging_bytes="64KiB", codec="none")
    with tiered_offload(store, min_bytes=0):
        loss = torch.randn(2**21, requires_grad=True).exp().tanh().sigmoid().sum()
    store.flush()
    loss.backward()
    line = store.stats().summary()
    assert "\n" not in line
    assert line.startswith(
        "tierstore: 24 MiB of saved tensors stored; 24 MiB written to disk as 24 MiB, 24 MiB read back; "
    )
    assert "held in host memory and 24 MiB on disk; training waited 0." in line
    assert "warning" not in line
    assert "staging_bytes" not in line


def test_summary_says_that_a_disk_is_memory() -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder, TierStore(folder, host_bytes=0, staging_bytes="64KiB") as store:
        assert "tmpfs" not in store.stats().summary()
        handle = store.put(torch.ones(2**20))
        store.flush()
        assert "that disk is memory (tmpfs)" in store.stats().summary()
        del handle


def test_summary_warns_where_nothing_was_stored_and_says_why(make_store: MakeStore) -> None:
    store = make_store()
    assert store.stats().summary() == (
        "tierstore: warning: nothing was stored; no saved tensor was seen: does forward run inside the scope, with "
        "gradients enabled?"
    )
    weight, value = torch.ones(2**18, requires_grad=True), torch.ones(2**18)
    for _ in range(3):
        with tiered_offload(store, min_bytes="1GiB"):
            (weight * value.clone()).sum().backward()
        with tiered_offload(store, min_bytes=0):
            (weight * torch.ones(2**18, requires_grad=True)).sum().backward()
    assert store.stats().kept_bytes["parameter"] == 6 * 2**20
    assert store.stats().summary() == (
        "tierstore: warning: nothing was stored; 9 MiB of saved tensors stayed where they are (each save counts): "
        "6 MiB parameters, 3 MiB small (`min_bytes`)"
    )


MIB = 2**20


@pytest.mark.parametrize(
    ("away_mib", "free_mib", "mode", "returned_bytes", "is_told"),
    [
        (240, 60, "auto", 0, True),
        (240, 59, "auto", 0, False),
        (32, 8, "auto", 0, True),
        (31, 400, "auto", 0, False),
        (240, 240, "off: musl offers no way to return freed memory", 0, True),
        (240, 240, "auto", 1, False),
        (240, 240, "always", 0, False),
        (240, 240, "never", 0, False),
        (240, 240, "auto, by the caching allocator of PyTorch's tensors", 0, True),
        (240, None, "auto", 0, False),
    ],
)
def test_summary_tells_of_freed_memory_that_is_kept_by_what_went_to_disk(
    store: TierStore, away_mib: int, free_mib: int | None, mode: str, returned_bytes: int, is_told: bool
) -> None:
    stats = dataclasses.replace(
        store.stats(),
        packed_bytes=1,
        disk_bytes_peak=away_mib * MIB,
        allocator_free_bytes=None if free_mib is None else free_mib * MIB,
        memory_return=mode,
        returned_bytes=returned_bytes,
    )
    what = (
        " for the tensors that come next"
        if "by the" in mode
        else "; tierstore-native's caching allocator would use it again"
    )
    told = f"its allocator keeps {free_mib} MiB of freed memory{what} (docs/how_to/memory_on_cpu.md)"
    assert (told in stats.summary()) is is_told


def test_summary_does_not_call_the_window_too_large_where_it_paid(make_store: MakeStore) -> None:
    """It gained memory of an accelerator; or the drive holds much in little space."""
    with SimulatedCopies() as copies:
        store = make_store(host_bytes="64MiB", staging_bytes="16MiB", copies=copies)
        with tiered_offload(store, min_bytes=0):
            torch.randn(2**18, requires_grad=True).exp().cos().exp().cos().sum().backward()
        summary = store.stats().summary()
    assert "MiB copied from the accelerator" in summary
    assert "staging_bytes" not in summary
    store = make_store(host_bytes=0, staging_bytes="16MiB", codec="zstd")
    handles = [store.put(torch.full((1024, 1024), float(number))) for number in range(12)]
    store.flush()
    stats = store.stats()
    assert stats.disk_bytes_peak < stats.staging_bytes < stats.spilled_bytes
    assert "saved at a time" not in stats.summary()
    del handles

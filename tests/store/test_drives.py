"""Several drives as one disk tier: the same contract, work in proportion to speed, and failures of one drive alone."""

import errno
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.descriptors import descriptors_of
from tests.hooks.programs import assert_same_gradients, training
from tests.inspect_store import inspect, inspect_drives, inspect_tier
from tests.store.disk_conformance import PLAIN, DiskConformance, at_phase, gather, random_bytes, read_back
from tierstore import ConfigError, CorruptDataError, StorageIOError, StoreFullError, TierStore
from tierstore.base.config import check_directories, free_bytes_of_each, free_disk_bytes
from tierstore.disk.budget import divided_budget
from tierstore.disk.drive import DriveSpeed
from tierstore.disk.drives import Drives
from tierstore.disk.file_layout import NamedFileLayout
from tierstore.disk.linux import address_of
from tierstore.disk.local import LocalDisk
from tierstore.disk.parts import results_of
from tierstore.disk.tier import DiskTier
from tierstore.testing import Fails, FaultPlan, Faults, FaultyCalls, FaultyExecutor, Rule

MIB = 2**20
NAMES = ("a", "b")
NUM_JOBS = 7


class SeveralDrives:
    """Opens tiers over the directories "a" and "b".

    Attributes:
        directories: by name.
        faults: in the system calls of all drives.
        seconds: the time by the drives' clock; it stands still.
    """

    def __init__(self, folder: Path, at_end: AsyncExitStack) -> None:
        self.directories = {name: folder / name for name in NAMES}
        for directory in self.directories.values():
            directory.mkdir()
        self.faults = Faults()
        self.seconds = 0.0
        self._at_end = at_end

    async def open(self, *, divides: bool = True, **options: Any) -> Drives:
        """Of 64 MiB without a codec, unless told otherwise. Every option may differ by drive: a mapping by name."""
        threads = self._at_end.enter_context(ThreadPoolExecutor(2 * NUM_JOBS * len(NAMES)))
        settings = {"disk_bytes": 32 * MIB, "inline_bytes": 64 * 2**10, "codec": "none", "checksum": True} | options
        executor = FaultyExecutor(threads, FaultyCalls(self.faults))
        openers = {
            str(directory): partial(
                LocalDisk,
                directory,
                executor=executor,
                **{key: value[name] if isinstance(value, dict) else value for key, value in settings.items()},
            )
            for name, directory in self.directories.items()
        }
        tier = await Drives.open(openers, num_jobs=NUM_JOBS, divides=divides)
        inspect_drives(tier).set_clock(lambda: self.seconds)
        self._at_end.push_async_callback(tier.close)
        return tier

    async def open_named(self, *names: str) -> Drives:
        """As a daemon opens them: files with names, whole records, in this order of drives."""
        self.directories = {name: self.directories[name] for name in names}
        layouts = {name: NamedFileLayout(directory, new_seed=1) for name, directory in self.directories.items()}
        return await self.open(divides=False, layout=layouts)

    def fails(self, name: str, number: int = errno.EIO, operation: Any = "pwritev") -> None:
        """From now on this call fails on one drive."""
        self.faults.set(FaultPlan.of(Rule(operation, Fails(number), under=str(self.directories[name]))))

    def are_sound(self) -> None:
        """From now on nothing fails."""
        self.faults.set(FaultPlan())


@pytest.fixture
async def several(tmp_path: Path) -> AsyncIterator[SeveralDrives]:
    async with AsyncExitStack() as at_end:
        yield SeveralDrives(tmp_path, at_end)
    assert not any(os.listdir(tmp_path / name) for name in NAMES), "files were left behind"


class TestConformance(DiskConformance):
    @pytest.fixture(
        params=[
            "divides",
            "whole",
            *(pytest.param(each, marks=pytest.mark.slow) for each in ("shuffle-zstd", "auto", "values")),
        ]
    )
    async def tier(self, request: pytest.FixtureRequest, several: SeveralDrives) -> Drives:
        options = {
            "whole": {"divides": False},
            "shuffle-zstd": {"codec": "shuffle-zstd"},
            "auto": {"codec": "auto"},
            "values": {"inline_bytes": None},
        }
        return await several.open(**options.get(request.param, {}))

    async def test_waits_for_a_discard_in_flight_instead_of_failing(self, tier: DiskTier) -> None:
        if not inspect_drives(tier).divides:  # type: ignore[arg-type]
            pytest.skip("its record is longer than the budget of each drive, and is not divided")
        await super().test_waits_for_a_discard_in_flight_instead_of_failing(tier)


async def fill(tier: Drives, first_key: int, sizes: list[int]) -> dict[int, bytes]:
    """Write records of these sizes, all at once; what is in them, by key."""
    contents = {first_key + number: random_bytes(size, seed=number) for number, size in enumerate(sizes)}
    await gather(*(tier.write(key, memoryview(content), PLAIN) for key, content in contents.items()))
    return contents


async def check(tier: Drives, contents: dict[int, bytes]) -> None:
    for key, content in contents.items():
        assert await read_back(tier, key, len(content)) == content


async def test_small_records_are_whole_and_large_ones_are_divided(several: SeveralDrives) -> None:
    for divides, num_parts in ((True, [1, 1, 2, 2]), (False, [1, 1, 1, 1])):
        tier = await several.open(divides=divides)
        contents = await fill(tier, 0, [1000, 4 * MIB, 8 * MIB, 11 * MIB + 77])
        assert [len(inspect_drives(tier).parts_of(key)) for key in contents] == num_parts
        assert tier.usage().num_records == 4
        await check(tier, contents)


async def test_parts_begin_at_the_same_address_modulo_4096_as_the_record(several: SeveralDrives) -> None:
    """So that each is read straight into the caller's memory, like a record that is whole."""
    tier = await several.open()
    inspect_drives(tier).set_speeds([1e6, 1.7e6])
    record = at_phase(random_bytes(20 * MIB + 5), 64)
    await tier.write(1, record, PLAIN)
    parts = inspect_drives(tier).parts_of(1)
    assert sum(parts) == len(record)
    assert parts[0] == pytest.approx(len(record) / 2.7, abs=4096)
    assert (address_of(record) + parts[0]) % 4096 == 64
    copy = at_phase(bytes(len(record)), 64)
    await tier.read(1, copy)
    assert copy == record
    inspect_drives(tier).set_speeds([1e9, 1e7])  # a drive that would have a short part gets none
    await fill(tier, 2, [10 * MIB])
    assert inspect_drives(tier).parts_of(2) == [10 * MIB]


async def test_records_go_where_they_end_first(several: SeveralDrives) -> None:
    """A drive three times as fast has three of four, counted by the bytes that are on their way."""
    tier = await several.open(disk_bytes=64 * MIB)
    inspect_drives(tier).set_speeds([1e8, 3e8])
    await fill(tier, 0, [2 * MIB] * 12)  # all begin before the first one ends
    slow, fast = (drive.usage().num_records for drive in inspect_drives(tier).disks)
    assert (slow, fast) == (3, 9)


def test_speed_is_that_of_the_time_with_something_to_write() -> None:
    speed = DriveSpeed()
    assert speed.bytes_per_second is None
    for start in (0.0, 100.0, 200.0):  # idle between
        speed.begin(start)
        speed.begin(start + 0.5)
        speed.end(MIB, start + 1)
        speed.end(MIB, start + 2)
    assert speed.bytes_per_second == pytest.approx(MIB)
    for now in range(300, 320):
        speed.begin(float(now))
        speed.end(32 * MIB, now + 1.0)
    assert speed.bytes_per_second == pytest.approx(32 * MIB, rel=0.01), "of late counts most"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", NAMES)
async def test_write_refused_by_one_drive_is_made_on_the_other(several: SeveralDrives, name: str, number: int) -> None:
    tier = await several.open()
    several.fails(name, number)
    contents = await fill(tier, 0, [300_000, 300_001, 9 * MIB])
    bad, good = (inspect_drives(tier).disks[NAMES.index(each)] for each in (name, *(set(NAMES) - {name})))
    assert (bad.usage().num_records, good.usage().num_records) == (0, 3)
    assert bad.usage().disk_bytes == 0
    await check(tier, contents)


async def test_drive_that_failed_rests_and_for_longer_each_time(several: SeveralDrives) -> None:
    tier = await several.open()
    several.fails("a")

    async def num_tries() -> int:
        before = sum(several.faults.injected.values())
        for _ in range(4):
            await tier.write(next(keys), memoryview(random_bytes(300_000)), PLAIN)
        return sum(several.faults.injected.values()) - before

    keys: Iterator[int] = iter(range(1000))
    assert await num_tries() == 1
    several.seconds = 9.0
    assert await num_tries() == 0
    several.seconds = 10.5
    assert await num_tries() == 1
    several.seconds = 29.0  # twice as long now
    assert await num_tries() == 0
    several.seconds = 31.0
    several.are_sound()
    await num_tries()
    assert inspect_drives(tier).disks[0].usage().num_records > 0


async def test_write_that_no_drive_takes_stores_nothing_and_names_the_drive(several: SeveralDrives) -> None:
    tier = await several.open()
    several.faults.set(FaultPlan.of(Rule("pwritev", Fails(errno.EIO))))
    for key, size in enumerate([300_000, 12 * MIB]):
        with pytest.raises(StorageIOError, match=str(several.directories["a"].parent)) as caught:
            await tier.write(key, memoryview(random_bytes(size)), PLAIN)
        assert "still in memory" in str(caught.value)
        usage = tier.usage()
        assert (usage.num_records, usage.disk_bytes) == (0, 0)


async def test_error_names_its_drive_once(several: SeveralDrives) -> None:
    tier = await several.open()
    for directory in several.directories.values():
        directory.rmdir()
    with pytest.raises(StorageIOError, match="No such file or directory") as caught:
        await tier.write(1, memoryview(bytes(2 * MIB)), PLAIN)
    named = [str(caught.value).count(f"{directory}") for directory in several.directories.values()]
    assert sorted(named) == [0, 1]
    for directory in several.directories.values():
        directory.mkdir()


async def test_write_allowance_is_each_drives_own(several: SeveralDrives) -> None:
    tier = await several.open(max_write_bytes_per_day=4 * MIB)
    assert tier.usage().write_allowance_bytes == 8 * MIB
    await fill(tier, 0, [3 * MIB] * 2)
    assert [disk.usage().num_records for disk in inspect_drives(tier).disks] == [1, 1]
    with pytest.raises(StoreFullError, match="max_write_bytes_per_day"):
        await tier.write(9, memoryview(bytes(3 * MIB)), PLAIN)


@pytest.mark.parametrize("name", NAMES)
async def test_damage_on_one_drive_is_told_with_record_and_drive(several: SeveralDrives, name: str) -> None:
    tier = await several.open()
    contents = await fill(tier, 5, [10 * MIB])
    disk = inspect_drives(tier).disks[NAMES.index(name)]
    (location,) = inspect_tier(disk).locations.values()
    assert location.offset is not None
    descriptor = os.open(f"/proc/self/fd/{inspect_tier(disk).descriptors[0]}", os.O_RDWR)  # without O_DIRECT
    try:
        os.pwrite(descriptor, b"damage", location.offset + 5000)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    with pytest.raises(CorruptDataError, match=str(several.directories[name])) as caught:
        await check(tier, contents)
    assert caught.value.key == 5


def test_damage_is_told_before_any_other_error() -> None:
    """What failed may be read later; what is damaged is lost."""
    damaged, failed = CorruptDataError(1, "a", "this", "that"), StorageIOError("read", "b", "a reason", "it is there")
    for outcomes in ([failed, damaged], [damaged, failed], [7, failed, damaged]):
        with pytest.raises(CorruptDataError):
            results_of(outcomes)
    assert results_of([7, 8]) == [7, 8]


async def test_records_of_both_drives_and_leases_of_the_first_are_found_again(several: SeveralDrives) -> None:
    tier = await several.open_named("a", "b")
    contents = await fill(tier, 0, [4 * MIB] * 6)
    assert all(disk.usage().num_records for disk in inspect_drives(tier).disks)
    await tier.put_lease(7, b"lease")
    await tier.close(keep=True)
    again = await several.open_named("a", "b")
    assert again.leases == {7: b"lease"}
    await check(again, contents)
    await again.discard(list(contents))
    assert again.is_empty


async def test_leases_of_a_drive_that_was_the_first_are_deleted(several: SeveralDrives) -> None:
    tier = await several.open_named("a", "b")
    await tier.put_lease(7, b"lease")
    await tier.close(keep=True)
    other_way_round = await several.open_named("b", "a")
    assert other_way_round.leases == {}
    await other_way_round.close(keep=True)
    assert (await several.open_named("a", "b")).leases == {}


async def test_record_found_on_two_drives_is_kept_on_the_first(several: SeveralDrives) -> None:
    """As when a damaged index claims a record that is on another drive."""
    contents = {each: random_bytes(MIB, seed=ord(each)) for each in NAMES}
    for each, content in contents.items():
        tier = await several.open_named("a", "b")
        await inspect_drives(tier).disks[NAMES.index(each)].write(1, memoryview(content), PLAIN)
        await tier.close(keep=True)
    tier = await several.open_named("a", "b")
    assert await read_back(tier, 1, MIB) == contents["a"]
    assert [disk.usage().num_records for disk in inspect_drives(tier).disks] == [1, 0]


async def test_drive_that_cannot_be_opened_closes_the_others(several: SeveralDrives) -> None:
    with pytest.raises(ConfigError):
        await several.open(disk_bytes={"a": MIB, "b": -1})  # the fixture sees descriptors that stay


@pytest.fixture
def directories(tmp_path: Path) -> Iterator[list[Path]]:
    found = [tmp_path / name for name in NAMES]
    for directory in found:
        directory.mkdir()
    yield found
    assert not any(list(directory.iterdir()) for directory in found), "files were left behind"


def test_training_over_two_drives_has_the_same_bits_and_uses_both(directories: list[Path]) -> None:
    with TierStore(directories, host_bytes=0, disk_bytes="1GiB") as store:
        for name in ("mlp", "transformer"):
            assert_same_gradients(training(name), store)
        tensor = torch.randn(16 * MIB // 4)
        handle = store.put(tensor.clone())
        store.flush()
        assert all(disk.usage().disk_bytes > 0 for disk in inspect_drives(inspect(store).disk).disks)
        child = os.fork()
        if child == 0:  # it keeps no file of any drive
            os._exit(sum(str(each) in target for each in directories for target in descriptors_of().values()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(store.get(handle), tensor)
        assert repr(store) == f"<TierStore {directories[0]}, {directories[1]}>"
        assert store.stats().io_mode in ("O_DIRECT", inspect(store).disk.usage().io_mode)
        del handle
        store.flush()
        assert store.stats().disk_bytes == 0


def test_budget_counts_the_free_space_of_one_file_system_once(directories: list[Path]) -> None:
    free_bytes = free_disk_bytes(directories[0])
    assert sum(free_bytes_of_each(directories)) == pytest.approx(free_bytes, rel=0.05)
    with TierStore(directories) as store:
        assert inspect(store).disk.usage().budget_bytes == pytest.approx(free_bytes * 0.8, rel=0.05)


@pytest.mark.parametrize(
    ("total", "capacities", "expected"),
    [
        (100 * MIB, [1], [100 * MIB]),
        (100 * MIB, [10, 30], [25 * MIB, 75 * MIB]),
        (10_000, [1, 1], [4096, 5904]),
        (8 * MIB, [0, 0], [4 * MIB, 4 * MIB]),
        (8 * MIB, [0, 5], [0, 8 * MIB]),
        (0, [3, 5], [0, 0]),
    ],
)
def test_budget_is_divided_as_the_free_space_is(total: int, capacities: list[int], expected: list[int]) -> None:
    assert divided_budget(total, capacities) == expected


def _linked(folder: Path) -> list[Path]:
    (folder / "link").symlink_to(folder)
    return [folder, folder / "link"]


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (lambda folder: [], "at least one"),
        (lambda folder: [folder, folder], "given twice"),
        (_linked, "given twice"),
        (lambda folder: [folder, folder / "missing"], "never created"),
        (lambda folder: [folder, Path(__file__)], "not a directory"),
        (lambda folder: [folder, 7], "give the path"),
    ],
)
def test_directories_that_cannot_be_used_are_refused(
    paths: Callable[[Path], list[Any]], said: str, tmp_path: Path
) -> None:
    given = paths(tmp_path)
    with pytest.raises(ConfigError, match=said) as caught:
        check_directories(given)
    assert caught.value.option == "path"
    with pytest.raises(ConfigError, match=said):
        TierStore(given)

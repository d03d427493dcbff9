"""Files with names: the next process finds what the last one left, whatever ended it, and never wrong bytes."""

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from tests.inspect_store import inspect_tier, segment_files
from tests.reliability.drives import MIB, mounted_drive
from tests.store.disk_conformance import PLAIN, DiskConformance, gather, random_bytes, read_back
from tests.store.named_layout_process import DISK_BYTES, Report, content_of, open_named, read
from tests.store.test_index import files_no_longer_than, location
from tierstore.disk import extents as extents_module
from tierstore.disk import file_layout as layout_module
from tierstore.disk.environment import Environment
from tierstore.disk.file_layout import FOLDER_NAME, NamedFileLayout
from tierstore.disk.folder import LockedFolder
from tierstore.disk.local import LocalDisk
from tierstore.errors import ConfigError, StorageIOError

ROOT = Path(__file__).parents[2]
KEYS = range(1, 25)
PAGE_BYTES = 4096


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Where tiers live; removed at a test's end, because what they keep takes real space."""
    drive = tmp_path / "drive"
    drive.mkdir()
    yield drive
    shutil.rmtree(drive)


@pytest.fixture
def folder(directory: Path) -> Path:
    return directory / FOLDER_NAME


class TestConformance(DiskConformance):
    @pytest.fixture
    async def tier(self, directory: Path) -> AsyncIterator[LocalDisk]:
        async with open_named(directory, "shuffle-zstd:3", inline_bytes=4096) as (_, disk):
            yield disk
            await disk.close()
        assert list(directory.iterdir()) == []


@contextmanager
def another(command: str, directory: Path, **options: object) -> Iterator[subprocess.Popen[str]]:
    """Another process, killed at the end if it still runs."""
    arguments = [sys.executable, "-m", "tests.store.named_layout_process", command, directory]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def check(directory: Path) -> Report | None:
    """Open in another process, read, write and keep; None: that process was ended by a signal."""
    with another("check", directory, stderr=subprocess.PIPE) as process:
        output, errors = process.communicate(timeout=60)
    if process.returncode < 0:
        return None
    assert process.returncode == 0, errors
    return msgspec.json.decode(output, type=Report)


async def fill(directory: Path) -> None:
    """Leave the records `KEYS`."""
    async with open_named(directory) as (_, disk):
        await gather(*(disk.write(key, memoryview(content_of(key)), PLAIN) for key in KEYS))


def assert_sound(disk: LocalDisk) -> None:
    """What is in use is exactly what the records take, and no two share a byte."""
    locations = disk.found_locations().values()
    assert disk.usage().disk_bytes == sum(each.taken_bytes for each in locations)
    in_extents = [each for each in locations if each.segment is not None]
    assert inspect_tier(disk).space.used_bytes == sum(each.taken_bytes for each in in_extents)
    extents = sorted((each.segment, each.offset, each.offset + each.taken_bytes) for each in in_extents)
    for (segment, _, end), (next_segment, offset, _) in pairwise(extents):
        assert segment != next_segment or end <= offset


async def test_kept_records_leases_and_budget_are_found_again(directory: Path) -> None:
    async with open_named(directory, "zstd") as (found, disk):
        assert found == "nothing"
        await gather(*(disk.write(key, memoryview(content_of(key)), PLAIN) for key in KEYS))
        await disk.put_lease(7, b"seven")
        await disk.put_lease(8, b"eight")
        await disk.put_lease(7, b"another")
        await disk.put_lease(9, b"nine")
        await disk.delete_lease(9)
        await disk.delete_lease(10)
        assert disk.leases == {}
        before, session = disk.usage(), disk.session
    assert session > 0
    async with open_named(directory, "none") as (found, disk):
        assert found == f"taken up: {len(KEYS)} records"
        assert disk.leases == {7: b"another", 8: b"eight"}
        usage = disk.usage()
        assert (usage.disk_bytes, usage.num_records, disk.session) == (before.disk_bytes, before.num_records, session)
        assert usage.disk_bytes < usage.allocated_bytes < DISK_BYTES
        flags = {fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT for file in segment_files(inspect_tier(disk).space)}
        assert flags == {os.O_DIRECT if usage.io_mode == "O_DIRECT" else 0}
        assert_sound(disk)
        for key in KEYS:
            assert await read(disk, key) == content_of(key)
            encoded = disk.found_locations()[key].codec != "none"
            assert disk.confirms(key, memoryview(content_of(key))) is not encoded
        with pytest.raises(ValueError, match="in use"):
            await disk.write(KEYS[0], memoryview(b"x"), PLAIN)
        await disk.discard(list(KEYS))
        assert disk.usage().disk_bytes == 0
    async with open_named(directory) as (found, disk):
        assert found == "taken up: 0 records"
        assert disk.usage().disk_bytes == 0
        assert not [name for name in os.listdir(directory / FOLDER_NAME) if name.startswith("segment")]


async def test_large_values_are_read_where_they_lie(directory: Path) -> None:
    lengths = {1: 70_000, 2: 3 * 2**20 + 1, 3: 100}
    async with open_named(directory, inline_bytes=None) as (_, disk):
        for key, length in lengths.items():
            await disk.write(key, memoryview(random_bytes(length)), PLAIN)
    async with open_named(directory, inline_bytes=None) as (_, disk):
        assert [each.offset is None for each in disk.found_locations().values()] == [False, False, True]
        for key, length in lengths.items():
            assert await read_back(disk, key, length) == random_bytes(length)


async def test_segments_that_are_empty_lose_their_names(
    directory: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents_module, "SEGMENT_BYTES", 2**20)

    def names() -> list[str]:
        return sorted(path.name for path in folder.glob("segment-*"))

    async with open_named(directory, disk_bytes=8 * 2**20) as (_, disk):
        for key in range(10):
            await disk.write(key, memoryview(bytes(500_000)), PLAIN)
        async with asyncio.timeout(20):
            while len(names()) != len(
                segment_files(inspect_tier(disk).space)
            ):  # the next one is being made, or has just been
                await asyncio.sleep(0.001)
        assert len(names()) > 1
        await disk.discard(range(10))
        await disk.write(10, memoryview(bytes(6 * 2**20)), PLAIN)  # needs the room of all of them
        assert len(names()) == len(segment_files(inspect_tier(disk).space)) == 1
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
        assert folder.stat().st_mode & 0o777 == 0o700


async def test_index_that_the_drive_refuses_to_change_is_not_cleared(directory: Path, folder: Path) -> None:
    """Wherever the pages lie that a start tries to write; such a limit refuses one of them, or cuts it short."""
    await fill(directory)
    starts = Counter[str]()
    for page in range(2, (folder / "index").stat().st_size // PAGE_BYTES):
        with files_no_longer_than(page * PAGE_BYTES + PAGE_BYTES // 2):
            try:
                async with open_named(directory) as (found, _):
                    starts[found] += 1
            except StorageIOError as error:
                assert os.strerror(errno.EFBIG) in str(error)  # noqa: PT017 - a start that goes well is right too
                starts["refused"] += 1
    assert set(starts) == {f"taken up: {len(KEYS)} records", "refused"}
    assert await open_and_look(directory) == (f"taken up: {len(KEYS)} records", len(KEYS))


async def test_another_boot_clears(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(directory)
    (tmp_path / "boot_id").write_text("another\n", encoding="ascii")
    monkeypatch.setattr(layout_module, "_BOOT_ID", tmp_path / "boot_id")
    assert await open_and_look(directory) == ("cleared: written before the last boot", 0)
    assert await open_and_look(directory) == ("taken up: 1 records", 1)


async def open_and_look(directory: Path) -> tuple[str, int]:
    """`found`, and the number of records; then one more is written."""
    async with open_named(directory) as (found, disk):
        num_records = disk.usage().num_records
        for key in disk.found_locations():
            assert await read(disk, key) == content_of(key)
        await disk.write(1000 + num_records, memoryview(content_of(1000 + num_records)), PLAIN)
        return found, num_records


def other_format(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        format_ = msgspec.json.decode((folder / "format").read_bytes())
        (folder / "format").write_bytes(msgspec.json.encode(format_ | changes))

    return change


def no_format(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "format").write_text(text, encoding="latin-1") and None


def garbage_in_the_index(folder: Path) -> None:
    (folder / "index").write_bytes(random_bytes((folder / "index").stat().st_size))


def keys_out_of_order(folder: Path) -> None:
    """As in a damaged tree, which may lead in circles."""
    content = (folder / "index").read_bytes()
    keys = [key.to_bytes(8, "big") + b"\x9a" for key in (5, 1)]  # as they precede a location: an array of ten
    (folder / "index").write_bytes(content.replace(*keys))


def lost_entries(folder: Path) -> None:
    """The count of entries lies 32 bytes into the table's record, which follows its name (struct MDB_db)."""
    content = bytearray((folder / "index").read_bytes())
    place = -1
    while (place := content.find(b"locations", place + 1)) >= 0:
        content[place + 9 + 32] += 1
    (folder / "index").write_bytes(content)


def entry(table: str, key: bytes | int, value: bytes | None) -> Callable[[Path], None]:
    """An entry of the index is another, or is gone."""
    packed = key if isinstance(key, bytes) else key.to_bytes(8, "big")

    def change(folder: Path) -> None:
        with open(folder / "index", "r+b", buffering=0) as file:
            index = Environment(file, 2**30)  # type: ignore[arg-type]
            with index.begin(write=True) as transaction:
                place = getattr(index, table)
                transaction.delete(packed, db=place) if value is None else transaction.put(packed, value, db=place)
            index.close()

    return change


def short_segment(folder: Path) -> None:
    os.truncate(folder / "segment-000000", PAGE_BYTES)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_format("garbage\xff"), "cleared: it has no readable format"),
        (no_format('{"a":' + "[" * 3000), "cleared: it has no readable format"),
        (lambda folder: (folder / "format").unlink(), "cleared: it has no readable format"),
        (other_format(version=1), "in format 1, not 2"),
        (other_format(alignment_bytes=7), "with an alignment of 7 bytes, not 4096"),
        (other_format(seed=-1), "no readable"),
        (other_format(seed=2**63), "no readable"),
        (lambda folder: (folder / "index").unlink(), "cleared: it has no index"),
        (garbage_in_the_index, "cleared: the index is damaged"),
        (keys_out_of_order, "keys of eight bytes in order"),
        (lost_entries, f"'{len(KEYS) + 1} entries', '{len(KEYS)}'"),
        (entry("locations", b"short", msgspec.msgpack.encode(location(1))), "cleared: the index is damaged"),
        (entry("locations", 1, b"\xc1 no msgpack"), "cleared: the index is damaged"),
        (entry("values", 3, None), "cleared: the index is damaged"),
        (entry("values", 5, b"short"), "cleared: the index is damaged"),
        (entry("values", 777, b"nobody's"), "cleared: the index is damaged"),
        (entry("values", 2, b"in an extent too"), "cleared: the index is damaged"),
        (short_segment, "a place of record 2 that there is"),
        (lambda folder: (folder / "segment-000000").unlink(), "a place of record 2 that there is"),
    ],
)
async def test_files_that_must_not_be_read_are_cleared(
    directory: Path, folder: Path, damage: Callable[[Path], None], words: str
) -> None:
    await fill(directory)
    seed = msgspec.json.decode((folder / "format").read_bytes())["seed"]
    damage(folder)
    found, num_records = await open_and_look(directory)
    assert words in found
    assert num_records == 0
    assert msgspec.json.decode((folder / "format").read_bytes())["seed"] != seed
    assert (await open_and_look(directory))[1] == 1


@pytest.mark.parametrize("kept", [1, 8192, -4096])
async def test_truncated_index_never_gives_wrong_bytes(directory: Path, folder: Path, kept: int) -> None:
    await fill(directory)
    length = (folder / "index").stat().st_size
    os.truncate(folder / "index", kept if kept > 0 else length + kept)
    first, second = check(directory), check(directory)
    assert first is not None, "a page behind the file's end ended the process"
    assert second is not None
    assert second == msgspec.structs.replace(first, found=second.found)
    assert (first.corrupt, first.failed) == (0, 0)


def die_in_reading(directory: Path, number: signal.Signals) -> None:
    with another(number.name, directory, stderr=subprocess.DEVNULL) as dying:
        assert dying.wait(60) == -number


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
async def test_index_whose_reading_crashes_a_start_is_cleared(directory: Path, number: signal.Signals) -> None:
    await fill(directory)
    die_in_reading(directory, number)
    assert await open_and_look(directory) == ("cleared: the last start ended while it read the index", 0)
    assert await open_and_look(directory) == ("taken up: 1 records", 1)


async def test_start_that_is_killed_while_it_reads_the_index_loses_nothing(directory: Path) -> None:
    """But the third in a row does: what hangs there must not hang every start."""
    await fill(directory)
    for num_kills in (1, 2, 3):
        for _ in range(num_kills):
            die_in_reading(directory, signal.SIGKILL)
        taken_up = f"taken up: {len(KEYS) + num_kills - 1} records"
        cleared = "cleared: the last start ended while it read the index"
        assert (await open_and_look(directory))[0] == (cleared if num_kills == 3 else taken_up)


async def test_second_process_is_refused_until_the_first_is_killed(directory: Path) -> None:
    await fill(directory)
    with another("hold", directory, stdin=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} holds .* a daemon is using this directory"):
            NamedFileLayout(directory)
        holder.kill()
        holder.wait(60)
    assert await open_and_look(directory) == (f"taken up: {len(KEYS)} records", len(KEYS))


async def test_close_removes_our_names_only(directory: Path, folder: Path) -> None:
    await fill(directory)
    assert sorted(os.listdir(folder)) == ["format", "index", "lock", "segment-000000"]
    (folder / "a file of others").write_bytes(bytes(PAGE_BYTES))
    layout = NamedFileLayout(directory)
    ours = [(folder / name).stat().st_blocks for name in ("format", "index", "segment-000000")]
    assert layout.taken_bytes == 512 * sum(ours) >= PAGE_BYTES
    layout.close(keep=True)
    (folder / "a file of others").unlink()
    async with open_named(directory) as (_, disk):
        await disk.close()
    assert os.listdir(directory) == []
    await fill(directory)
    foreign = ["a file of others", "segment-1", "index-old"]
    for name in foreign:
        (folder / name).touch()
    (folder / "format").unlink()
    assert (await open_and_look(directory))[0].startswith("cleared")
    async with open_named(directory) as (_, disk):
        await disk.close()
    assert sorted(os.listdir(folder)) == sorted([*foreign, "lock"])
    assert (await open_and_look(directory))[0] == "nothing"


@pytest.mark.parametrize("kind", ["ext4", "btrfs", "fuse", "tmpfs"])
async def test_close_leaves_nothing_on_any_file_system(tmp_path: Path, kind: str) -> None:
    with mounted_drive(tmp_path, 256 * MIB, [kind]) as drive:
        found = os.listdir(drive)
        for _ in range(3):
            async with open_named(drive) as (_, disk):
                for key in KEYS:
                    await disk.write(key, memoryview(content_of(key)), PLAIN)
                assert (drive / FOLDER_NAME / "segment-000000").exists()
                await disk.close()
            assert os.listdir(drive) == found


def test_folder_that_others_prepared_is_refused(directory: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    for make in (lambda: folder.symlink_to(tmp_path / "elsewhere"), folder.touch):
        make()
        with pytest.raises(ConfigError, match="is a link or a file"):
            NamedFileLayout(directory)
        folder.unlink()
    folder.mkdir()
    folder.chmod(0o720)
    with pytest.raises(ConfigError, match="has mode 0720, so others may use it"):
        NamedFileLayout(directory)
    folder.chmod(0o700)
    (folder / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        NamedFileLayout(directory)
    assert not (tmp_path / "victim").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        with pytest.raises(ConfigError, match="belongs to user 65534, not to 0"):
            NamedFileLayout(directory)
    with pytest.raises(ConfigError, match="no such directory"):
        NamedFileLayout(directory / "missing")


def test_folder_that_is_removed_while_it_is_locked_is_refused(
    directory: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process may do that was just closing it. Nobody uses a folder that the next one cannot see."""
    open_lock = LockedFolder._open_lock
    left = ["lock", "tierstore-daemon"]

    def open_and_remove(locked: LockedFolder) -> int:
        found = open_lock(locked)
        shutil.rmtree(folder) if left.pop() == FOLDER_NAME else (folder / "lock").unlink()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(LockedFolder, "_open_lock", open_and_remove)
        while left:
            with pytest.raises(ConfigError, match="was just removed"):
                NamedFileLayout(directory)
    NamedFileLayout(directory).close(keep=False)
    assert os.listdir(directory) == []

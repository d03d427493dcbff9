"""`LocalDisk`: the conformance tests in every layout, and what only a real directory can show."""

import asyncio
import errno
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.descriptors import descriptors_of
from tests.inspect_store import inspect_tier
from tests.reliability.drives import MIB, mounted_drive, used_bytes
from tests.store.disk_conformance import PLAIN, DiskConformance, at_phase, gather, random_bytes, read_back
from tests.store.disks import local_disk
from tierstore.disk.file_layout import NamedFileLayout
from tierstore.disk.linux import address_of
from tierstore.disk.local import LocalDisk
from tierstore.disk.records import lay_out, split_at
from tierstore.disk.segments import detect_io_mode
from tierstore.disk.tier import Kind
from tierstore.errors import CorruptDataError, StorageIOError, StoreFullError

OpenDisk = Callable[..., Awaitable[LocalDisk]]
MASK = Kind("uint8", 1, "DropoutBackward0")


@pytest.fixture
async def open_disk(store_directory: Path) -> AsyncIterator[OpenDisk]:
    """Opens tiers in `store_directory` unless told otherwise, as `local_disk`; closes them at the end."""
    async with AsyncExitStack() as at_end:
        yield lambda **options: at_end.enter_async_context(local_disk(**({"directory": store_directory} | options)))


class TestConformance(DiskConformance):
    @pytest.fixture(
        params=[
            ("none", 0),
            ("shuffle-zstd", None),
            ("auto", 64 * 2**10),
            pytest.param(("none", 64 * 2**10), marks=pytest.mark.slow),
            pytest.param(("none", None), marks=pytest.mark.slow),
            pytest.param(("zstd", 64 * 2**10), marks=pytest.mark.slow),
            pytest.param(("shuffle-zstd:3", 4096), marks=pytest.mark.slow),
        ],
        ids=lambda layout: f"{layout[0]}-{layout[1]}",
    )
    async def tier(self, request: pytest.FixtureRequest, open_disk: OpenDisk) -> LocalDisk:
        codec, inline_bytes = request.param
        return await open_disk(codec=codec, inline_bytes=inline_bytes)


@pytest.mark.parametrize("alignment", [1, 512, 4096])
def test_layout_cuts_every_address_and_length(alignment: int) -> None:
    for address in (0, 1, 64, 511, 512, 4095):
        for num_bytes in (0, 1, 511, 512, 513, 1023, 4096, 8191, 100_001):
            layout = lay_out(address, num_bytes, alignment)
            assert sum(layout) == num_bytes
            assert layout.interior_bytes % alignment == 0
            assert not layout.interior_bytes or (address + layout.head_bytes) % alignment == 0
            assert layout.head_bytes + layout.tail_bytes <= 2 * (alignment - 1)
            if layout.interior_bytes:
                assert split_at(layout.head_bytes, num_bytes, alignment) == layout
            else:
                assert layout.head_bytes == 0  # then the bytes lie in order, however they are cut on reading


@pytest.mark.parametrize(
    ("content", "inline_bytes", "codec", "most_bytes"),
    [
        (bytes(2**20), 2**20, "zstd:1", 4095),
        (b"".join(random_bytes(256, seed) * 2 for seed in range(8192)), 0, "zstd:1", 0.6 * 2**22),
        (random_bytes(2**20), 64 * 2**10, "none", 2**20),
    ],
    ids=["to a value", "to half an extent", "in vain"],
)
async def test_encoded_record_takes_what_it_needs(
    open_disk: OpenDisk, content: bytes, inline_bytes: int, codec: str, most_bytes: float
) -> None:
    disk = await open_disk(codec="zstd", inline_bytes=inline_bytes)
    receipt = await disk.write(1, memoryview(content), PLAIN)
    assert receipt.codec == codec
    assert receipt.stored_bytes == disk.usage().disk_bytes <= most_bytes
    assert disk.codec_choices() == {"float32 MulBackward0": {codec: 1}}, "a fixed codec looks at no content"
    assert await read_back(disk, 1, len(content), 77) == content
    assert disk.confirms(1, memoryview(content)) is (codec == "none")  # else the checksum is over what was encoded


async def test_record_of_several_calls_is_whole(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 128 KiB, and calls that move less than they were asked to."""
    real_write, real_read = os.pwritev, os.preadv

    def shorter(buffers: list[memoryview]) -> list[memoryview]:
        first = buffers[0]
        return [first[: len(first) // 2 // 4096 * 4096]] if len(first) >= 8192 else buffers

    monkeypatch.setattr("tierstore.disk.transfer._CALL_BYTES", 128 * 2**10)
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: real_write(fd, shorter(buffers), at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real_read(fd, shorter(buffers), at))
    disk = await open_disk()
    content = random_bytes(3 * 2**20 + 4001)
    await disk.write(1, at_phase(content, 64), PLAIN)
    for phase in (64, 65):
        assert await read_back(disk, 1, len(content), phase) == content


def seconds_that_fly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock of transfers is a second later: the disk seems slow."""
    clock = SimpleNamespace(perf_counter=itertools.count().__next__, process_time=time.process_time)
    monkeypatch.setattr("tierstore.disk.codec.policy.time", clock)
    monkeypatch.setattr("tierstore.disk.codec.load.time", clock)


async def test_auto_learns_to_encode_what_pays(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that seems slow, masks and zeros are encoded once its speed is known, random bytes never are."""
    seconds_that_fly(monkeypatch)

    disk = await open_disk(codec="auto")
    noise, zeros = random_bytes(2**20), bytes(2**20)
    mask = bytes(byte & 1 for byte in noise)
    for key in range(6):
        await disk.write(4 * key, memoryview(mask), MASK)
        await disk.write(4 * key + 1, memoryview(noise), PLAIN)
        await disk.write(4 * key + 2, memoryview(zeros), PLAIN)
    choices = {kind: set(counts) for kind, counts in disk.codec_choices().items()}
    assert choices["uint8 DropoutBackward0, many zeros"] == {"none", "bits"}
    assert choices["float32 MulBackward0, all zeros"] == {"none", "constant"}
    assert choices["float32 MulBackward0"] == {"none"}
    assert await read_back(disk, 20, len(mask)) == mask
    assert await read_back(disk, 22, len(zeros)) == zeros


async def test_auto_stops_encoding_a_record_that_is_unlike_its_kind(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that shrink to a quarter, and one that shrinks by a sixth only: that one is stored as it is."""
    seconds_that_fly(monkeypatch)

    disk = await open_disk(codec="auto")
    usual = b"".join(random_bytes(2**10, seed) * 4 for seed in range(768))
    unlike = b"".join(random_bytes(5 * 2**10, seed) + bytes(2**10) for seed in range(512))
    for key in range(6):
        await disk.write(key, memoryview(usual), PLAIN)
    assert (await disk.write(10, memoryview(usual), PLAIN)).codec != "none"
    assert (await disk.write(11, memoryview(unlike), PLAIN)).codec == "none"
    assert await read_back(disk, 10, len(usual)) == usual
    assert await read_back(disk, 11, len(unlike)) == unlike


async def test_auto_encodes_when_space_runs_short(open_disk: OpenDisk) -> None:
    disk = await open_disk(codec="auto", disk_bytes=8 * 2**20, inline_bytes=0)
    content = b"".join(random_bytes(128, seed) * 4 for seed in range(512))
    for key in range(33):  # one more than fits as it is
        await disk.write(key, memoryview(content), PLAIN)
    assert disk.codec_choices()["float32 MulBackward0"].keys() > {"none"}
    for key in range(33):
        assert await read_back(disk, key, len(content)) == content


@pytest.mark.parametrize("codec", ["none", "zstd"])
async def test_failed_write_takes_nothing_and_the_next_one_works(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the device failed")

    disk = await open_disk(codec=codec, inline_bytes=0)
    content = random_bytes(2**20) * 2 if codec == "none" else bytes(2**20)
    with monkeypatch.context() as patch:
        patch.setattr("tierstore.disk.records.write_all", fail)
        with pytest.raises(StorageIOError, match="still in memory"):
            await disk.write(1, memoryview(content), PLAIN)
    assert (disk.usage().disk_bytes, disk.usage().num_records) == (0, 0)
    await disk.write(2, memoryview(content), PLAIN)
    assert await read_back(disk, 2, len(content)) == content


def flip_byte(disk: LocalDisk, content: bytes) -> None:
    """Flip one byte of what is stored, behind the tier's back."""
    for descriptor in inspect_tier(disk).descriptors:
        path = f"/proc/self/fd/{descriptor}"
        with open(path, "r+b") as file:
            place = file.read().find(content)
            if place >= 0:
                file.seek(place)
                file.write(bytes([content[0] ^ 1]))
                return
    raise LookupError("not on disk")


@pytest.mark.parametrize("inline_bytes", [0, 64 * 2**10, None])
async def test_flipped_byte_is_found(open_disk: OpenDisk, inline_bytes: int | None) -> None:
    disk = await open_disk(inline_bytes=inline_bytes, disk_bytes=4 * 2**20)
    for key, size in enumerate((20_000, 300_000)):
        content = random_bytes(size)
        await disk.write(key, memoryview(content), PLAIN)
        flip_byte(disk, content[9000:9016])
        with pytest.raises(CorruptDataError) as caught:
            await read_back(disk, key, size)
        assert caught.value.key == key
        assert "checksum" in caught.value.expected


async def test_damaged_encoding_is_found_without_checksums(open_disk: OpenDisk) -> None:
    disk = await open_disk(codec="zstd", checksum=False, inline_bytes=0, disk_bytes=4 * 2**20)
    await disk.write(1, memoryview(bytes(300_000)), PLAIN)
    flip_byte(disk, b"\x28\xb5\x2f\xfd")  # a zstd frame's first bytes
    with pytest.raises(CorruptDataError):
        await read_back(disk, 1, 300_000)


@pytest.mark.parametrize("inline_bytes", [0, 64 * 2**10, None])
@pytest.mark.parametrize("codec", ["none", "zstd"])
async def test_sound_record_under_the_wrong_key_is_refused(
    open_disk: OpenDisk, inline_bytes: int | None, codec: str
) -> None:
    disk = await open_disk(inline_bytes=inline_bytes, codec=codec)
    size = 200_000
    for key in (1, 2):
        await disk.write(key, memoryview(bytes([key]) * 100_000 + random_bytes(100_000)), PLAIN)
    locations = inspect_tier(disk).locations
    locations[1], locations[2] = locations[2], locations[1]
    for key in (1, 2):
        with pytest.raises(CorruptDataError, match="checksum"):
            await read_back(disk, key, size)


async def test_record_of_another_session_is_refused(open_disk: OpenDisk) -> None:
    disk = await open_disk()
    for size in (100, 100_000):
        await disk.write(size, memoryview(random_bytes(size)), PLAIN)
        inspect_tier(disk).pretend_session(2)
        with pytest.raises(CorruptDataError, match="checksum"):
            await read_back(disk, size, size)
        inspect_tier(disk).pretend_session(0)
        assert await read_back(disk, size, size) == random_bytes(size)


DAMAGES: list[dict[str, object]] = [
    {"checksum": None},
    {"checksum": 0},
    {"itemsize_bytes": 2},
    {"codec": "zstd", "itemsize_bytes": 1},
    {"codec": "shuffle-zstd"},
    {"codec": "bits"},
    {"codec": "none"},
    {"head_bytes": 64},
    {"encoded_bytes": 9_000},
]


@pytest.mark.parametrize("inline_bytes", [0, None])
@pytest.mark.parametrize("codec", ["none", "zstd", "shuffle-zstd"])
async def test_damaged_location_gives_no_wrong_value(open_disk: OpenDisk, inline_bytes: int | None, codec: str) -> None:
    content = bytes(range(16)) * 10_000

    disk = await open_disk(inline_bytes=inline_bytes, codec=codec)
    await disk.write(1, memoryview(content), Kind(itemsize_bytes=4))
    locations = inspect_tier(disk).locations
    sound = locations[1]
    for damage in DAMAGES:
        locations[1] = msgspec.structs.replace(sound, **damage)
        try:
            assert await read_back(disk, 1, len(content)) == content, damage
            assert "checksum" not in damage
        except CorruptDataError:
            assert locations[1] != sound
    locations[1] = sound


async def test_place_beyond_the_file_is_an_error_not_a_short_read(open_disk: OpenDisk) -> None:
    disk = await open_disk(inline_bytes=0)
    await disk.write(1, memoryview(random_bytes(100_000)), PLAIN)
    locations = inspect_tier(disk).locations
    location = locations[1]
    locations[1] = msgspec.structs.replace(location, offset=2**40)
    with pytest.raises(StorageIOError, match="still on disk"):
        await read_back(disk, 1, 100_000)
    locations[1] = location
    assert await read_back(disk, 1, 100_000) == random_bytes(100_000)


@pytest.fixture(params=["tmpfs", "ext4"])
def small_drive(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A real file system of 16 MiB."""
    with mounted_drive(tmp_path, 16 * MIB, kinds=(request.param,)) as drive:
        yield drive


async def test_whole_pages_of_memory_are_read_and_written_on_any_file_system(
    small_drive: Path, open_disk: OpenDisk
) -> None:
    disk = await open_disk(directory=small_drive, inline_bytes=0)
    source = memoryview(bytearray(100_000))
    await disk.write(1, source, PLAIN)
    assert disk.found_locations()[1].head_bytes == -address_of(source) % 4096  # else the kernel's copies are slow


@pytest.mark.parametrize("inline_bytes", [0, 64 * 2**10, None])
async def test_full_file_system_is_store_full_and_goes_on(
    small_drive: Path, open_disk: OpenDisk, inline_bytes: int | None
) -> None:
    disk = await open_disk(directory=small_drive, disk_bytes=2**30, inline_bytes=inline_bytes)
    told = "O_DIRECT" if inline_bytes is not None else "buffered up to 1.00 GiB (inline_bytes), O_DIRECT above"
    assert disk.usage().io_mode in ("buffered (tmpfs)", told)
    contents: dict[int, bytes] = {}

    async def fill(start: int) -> None:
        for key in range(start, start + 1000):
            content = random_bytes(200_000, seed=key)
            await disk.write(key, memoryview(content), PLAIN)
            contents[key] = content

    for start in (0, 1000):
        with pytest.raises(StoreFullError) as caught:
            await fill(start)
        assert "No space left" in str(caught.value)
        assert "still in memory" in str(caught.value)
        assert used_bytes(small_drive) > 8 * 2**20, (start, len(contents), str(caught.value), disk.usage())
        for key, content in contents.items():
            assert await read_back(disk, key, len(content)) == content
        await disk.discard(list(contents))
        contents.clear()
        assert disk.usage().num_records == 0


async def test_small_records_of_a_full_drive_can_be_discarded(small_drive: Path, open_disk: OpenDisk) -> None:
    """LMDB needs pages to delete, too, and what freed records left may have become a segment meanwhile."""
    disk = await open_disk(directory=small_drive, disk_bytes=2**30, layout=NamedFileLayout(small_drive))
    keys = itertools.count()
    for _ in range(2):
        written: list[int] = []
        refused: list[BaseException] = []
        while not refused:
            some = list(itertools.islice(keys, 64))
            writes = (disk.write(key, memoryview(bytes(300 + key % 600)), PLAIN) for key in some)
            for key, outcome in zip(some, await asyncio.gather(*writes, return_exceptions=True), strict=True):
                if isinstance(outcome, BaseException):
                    refused.append(outcome)
                else:
                    written.append(key)
        assert all(isinstance(error, StoreFullError) for error in refused)
        assert len(written) > 10_000
        await gather(*(disk.discard(written[part::4]) for part in range(4)))
        assert disk.is_empty
        assert disk.usage().disk_bytes == 0
        await disk.write(key := next(keys), memoryview(bytes(MIB)), PLAIN)  # in a segment, which takes what is free
        await disk.discard([key])


async def test_drive_that_refuses_the_space_for_deletions_and_fails_refuses_none(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A discard may not fail: it would close the store. Such a drive is full, and was made read-only by an error."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tierstore.disk.reserve.reserve", refuse)
    monkeypatch.setattr(os, "ftruncate", refuse)
    disk = await open_disk()
    await disk.write(1, memoryview(bytes(300)), PLAIN)
    await disk.discard([1])
    assert disk.is_empty


async def test_record_that_the_index_refuses_is_no_record(
    open_disk: OpenDisk, store_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index's map, made far too small here, is full: what was not committed was not stored."""
    monkeypatch.setattr("tierstore.disk.file_layout.map_bytes_for", lambda disk_bytes: 2**17)

    layout = NamedFileLayout(store_directory)  # one without names keeps no extent in the index
    disk = await open_disk(inline_bytes=0, layout=layout)
    stored: dict[int, bytes] = {}

    async def fill() -> None:
        for key in range(10_000):
            content = random_bytes(3000, seed=key)
            await disk.write(key, memoryview(content), PLAIN)
            stored[key] = content

    with pytest.raises(StoreFullError, match="MDB_MAP_FULL"):
        await fill()
    assert disk.usage().num_records == len(stored) > 0
    for key, content in stored.items():
        assert await read_back(disk, key, len(content)) == content


@pytest.mark.parametrize(
    ("kind", "expected"), [("overlay", "buffered (tmpfs under overlayfs)"), ("tmpfs", "buffered (tmpfs)")]
)
async def test_mode_tells_of_a_drive_that_is_memory(
    tmp_path: Path, open_disk: OpenDisk, kind: str, expected: str
) -> None:
    with mounted_drive(tmp_path, 16 * MIB, [kind]) as drive:
        disk = await open_disk(directory=drive)
        assert disk.usage().io_mode == expected
        await disk.close()


@pytest.mark.parametrize(
    ("inline_bytes", "expected"),
    [
        (0, "O_DIRECT"),
        (128 * 2**10, "O_DIRECT"),
        (4 * 2**20, "buffered up to 4 MiB (inline_bytes), O_DIRECT above"),
        (None, "buffered up to 1.00 GiB (inline_bytes), O_DIRECT above"),
    ],
)
async def test_mode_tells_of_long_records_in_the_page_cache(
    open_disk: OpenDisk, store_directory: Path, inline_bytes: int | None, expected: str
) -> None:
    mode = detect_io_mode(store_directory)
    disk = await open_disk(inline_bytes=inline_bytes)
    assert disk.usage().io_mode == (expected if mode.direct else mode.description)


async def test_extents_that_nobody_will_look_for_do_not_enter_the_index(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index's map is far too small for an entry each; small values still need it."""
    monkeypatch.setattr("tierstore.disk.file_layout.map_bytes_for", lambda disk_bytes: 2**18)

    disk = await open_disk(inline_bytes=1000)
    content = random_bytes(3000)
    for key in range(3000):
        await disk.write(key, memoryview(content), PLAIN)
    assert await read_back(disk, 2999, len(content)) == content
    await disk.discard(range(3000))
    assert disk.usage().disk_bytes == 0
    await disk.write(5000, memoryview(content[:1000]), PLAIN)
    assert await read_back(disk, 5000, 1000) == content[:1000]


async def test_close_lets_go_of_every_descriptor_and_byte(open_disk: OpenDisk, store_directory: Path) -> None:
    await (await open_disk()).close()  # what the process keeps from its first on
    before = set(descriptors_of())
    disk = await open_disk()
    await gather(*(disk.write(key, memoryview(bytes(10**key)), PLAIN) for key in range(8)))
    assert os.listdir(store_directory) == []
    assert set(inspect_tier(disk).descriptors) <= descriptors_of().keys() - before
    assert len(inspect_tier(disk).descriptors) >= 3
    await disk.close()
    assert descriptors_of().keys() <= before
    assert str(store_directory) not in Path("/proc/self/maps").read_text(encoding="utf-8")


async def test_loop_goes_on_while_a_long_job_runs(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waits for the loop ends, so the loop cannot be waiting for the job."""
    begun, may_end, real_write = threading.Event(), threading.Event(), os.pwritev

    def long_write(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        begun.set()
        assert may_end.wait(20), "the loop stands still"
        return real_write(descriptor, buffers, offset)

    disk = await open_disk(inline_bytes=0)
    monkeypatch.setattr(os, "pwritev", long_write)
    writing = asyncio.ensure_future(disk.write(1, memoryview(random_bytes(8 * 2**20)), PLAIN))
    while not begun.is_set():
        await asyncio.sleep(0)
    may_end.set()
    await writing

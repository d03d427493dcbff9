"""What an earlier process left: entries of the index, the format file, leases. All of it may be damaged."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import lmdb
import msgspec
import zstandard

from tests.fuzz.encoded import small_scratch
from tests.fuzz.target import Target, raises
from tierstore.daemon.sessions import KEY_BITS, Lease, kept_leases
from tierstore.disk.budget import map_bytes_for, value_charge_bytes
from tierstore.disk.codec.codec import DamagedBytesError
from tierstore.disk.file_layout import FOLDER_NAME, NamedFileLayout, spans_of
from tierstore.disk.index import Index
from tierstore.disk.location import FileRange, Location, record_seed
from tierstore.disk.records import decode_small_value, read_record
from tierstore.disk.scratch import ScratchPool
from tierstore.disk.segments import IoMode, close_segments

__all__ = ["TARGETS"]

_DISK_BYTES = 2**20
_SEGMENTS = {0: 64 * 2**10, 1: 2**20, 7: 0}
_MOST_LOGICAL_BYTES = 128 * 2**10
_BUFFERED = IoMode(False, "buffered (a test)")

# Values of a location's fields, to be combined: sound ones, neighbours, and what no record has.
_NUMBERS = (None, 0, 1, 7, -1, 4096, 8192, 4095, 100, 65_536, 2**20, 2**40, 2**63, 2**64 - 1, value_charge_bytes(100))
_WORDS = ("none", "zstd", "shuffle-zstd", "bits", "constant", "", "zstd:1", "none\0", "ß")
_NUM_FIELDS = len(Location.__struct_fields__)


@cache
def _folder() -> Path:
    """In memory where there is such a thing; removed when the process ends."""
    shared = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="tierstore-fuzz-", dir=shared if shared.is_dir() else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


class _Bench:
    """What all runs share."""

    def __init__(self) -> None:
        self.index = Index.without_name(_folder(), map_bytes_for(_DISK_BYTES))
        self.pool = ScratchPool(1)
        with self.pool.lend() as scratch:
            scratch.chunk = small_scratch(4096).chunk
        self.segment = os.memfd_create("fuzz")
        os.pwrite(self.segment, b"\x05\x00\x00\x80hello" * 8, 0)
        os.ftruncate(self.segment, max(_SEGMENTS.values()))
        self.memory = bytearray(_MOST_LOGICAL_BYTES)

    def fill(self, entries: list[tuple[str, bytes, bytes]]) -> None:
        """The index holds these, by table, key and value, and nothing else."""
        tables = {name: getattr(self.index._lmdb, name) for name in ("locations", "values", "leases")}
        with self.index.begin(write=True) as transaction:
            for table in tables.values():
                transaction.drop(table, delete=False)
            for name, key, value in entries:
                transaction.put(key, value, db=tables[name])


_bench = cache(_Bench)


def _entries(data: bytes) -> Iterator[tuple[str, bytes, bytes]]:
    """An operation's byte, a key's, a length, and so many bytes: as they are, or numbers of a location's fields."""
    at = 0
    while at + 3 <= len(data) and at < 4096:
        operation, number, length = data[at : at + 3]
        rest = data[at + 3 : at + 3 + length]
        at += 3 + len(rest)
        key = bytes([number]) * (1 + number % 16) if operation & 0x80 else number.to_bytes(8, "big")
        match operation & 0x03:
            case 0:
                yield "locations", key, rest
            case 1:
                yield "values", key, rest * (1 + (operation >> 2 & 0x1F) ** 2)
            case 2:
                yield "leases", key, rest
            case 3:
                yield "locations", key, _location_of(rest)


def _location_of(choices: bytes) -> bytes:
    fields: list[object] = [_NUMBERS[each % len(_NUMBERS)] for each in choices[:_NUM_FIELDS].ljust(_NUM_FIELDS, b"\0")]
    fields[Location.__struct_fields__.index("codec")] = _WORDS[choices[5] % len(_WORDS)] if len(choices) > 5 else "none"
    return msgspec.msgpack.encode(fields)


def _run_index(data: bytes) -> None:
    bench = _bench()
    bench.fill(list(_entries(data)))
    try:
        locations, leases = bench.index.entries()
        spans = spans_of(locations, _SEGMENTS)
    except (DamagedBytesError, lmdb.Error):
        return
    _check_spans(locations, spans)
    for key, location in locations.items():
        _read(key, location)
    _check_leases(leases)


def _check_spans(locations: dict[int, Location], spans: dict[int, dict[int, int]]) -> None:
    """Each lies in its segment and touches nothing else; all of that is told, and no more."""
    taken = sorted(
        (location.segment, location.offset, location.taken_bytes)
        for location in locations.values()
        if location.segment is not None
    )
    assert taken == sorted(
        (number, start, size) for number, extents in spans.items() for start, size in extents.items()
    )
    for number, start, size in taken:
        assert start >= 0
        assert size > 0
        assert start % 4096 == size % 4096 == 0
        assert start + size <= _SEGMENTS[number]
    assert all(one[0] != other[0] or one[1] + one[2] <= other[1] for one, other in pairwise(taken))


def _read(key: int, location: Location) -> None:
    """A record that may be right is read, or is damaged: nothing else."""
    bench = _bench()
    if location.logical_bytes > _MOST_LOGICAL_BYTES:
        return  # whoever reads it has so much memory; no other length is read
    destination = memoryview(bench.memory)[: location.logical_bytes]
    seed = None if location.checksum is None else record_seed(1, key)  # so that some come to be decoded
    if location.segment is not None and location.offset is not None:
        place = FileRange(bench.segment, location.offset, location.taken_bytes, 1)
        raises(DamagedBytesError, lambda: read_record(place, location, seed, destination, bench.pool))
        return
    with bench.index.begin(buffers=True) as transaction:
        value = transaction.get(key.to_bytes(8, "big"), db=bench.index._lmdb.values)
        assert value is not None
        raises(DamagedBytesError, lambda: decode_small_value(location, seed, destination, bench.pool, value))


def _check_leases(blobs: dict[int, bytes]) -> None:
    """Each is right or named as damaged, and no number is used twice."""
    found = kept_leases(blobs)
    assert sorted([*found.leases, *found.damaged]) == sorted(blobs.keys() - {0})
    assert 0 < found.next_number < 2 ** (64 - KEY_BITS)
    for number, lease in found.leases.items():
        assert lease.number == number < found.next_number
        lease.is_resumed_by(b"", 0)


def _run_leases(data: bytes) -> None:
    """A number's byte, a length, so many bytes, and so on."""
    blobs = {}
    while len(data) >= 2:
        number, num_bytes = data[0], data[1] if data[1] < 255 else len(data)
        blobs[number if number < 250 else 1 << number - 200], data = data[2 : 2 + num_bytes], data[2 + num_bytes :]
    _check_leases(blobs)


def _run_format(data: bytes) -> None:
    """Whatever the file says, the folder opens: what it held is taken up, or cleared; the seed makes checksums."""
    layout = NamedFileLayout(_folder())
    try:
        (_folder() / FOLDER_NAME / "format").write_bytes(_format_of(data))
        contents = layout.open(_DISK_BYTES, _BUFFERED)
        record_seed(contents.session, 1)
        close_segments(contents.segments, set())
        contents.index.close()
    finally:
        layout.close(keep=True)


def _format_of(data: bytes) -> bytes:
    """As it is; or, after a "!", the bytes of a sound file with some of them replaced: place, byte."""
    if not data.startswith(b"!"):
        return data
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    sound = bytearray(b'{"version":2,"boot_id":"%s","alignment_bytes":4096,"seed":1234567}' % boot_id.encode())
    for place, byte in zip(data[1::2], data[2::2], strict=False):
        sound[place % len(sound)] = byte
    return bytes(sound)


def _sound_location(**changes: object) -> bytes:
    sound = Location(None, None, value_charge_bytes(9), 9, 5, "zstd", 1, 4, 0, None)
    return msgspec.msgpack.encode(msgspec.structs.replace(sound, **changes))


def _entry(operation: int, key: int, content: bytes) -> bytes:
    return bytes([operation, key, len(content)]) + content


def _index_seeds() -> list[bytes]:
    value = b"\x05\x00\x00\x80hello"
    extent = _sound_location(
        segment=1, offset=4096, taken_bytes=4096, codec="none", encoded_bytes=100, logical_bytes=100
    )
    twin = _sound_location(
        segment=1, offset=4096, taken_bytes=8192, codec="none", encoded_bytes=5000, logical_bytes=5000
    )
    lease = msgspec.msgpack.encode(Lease(3, bytes(32), 0, "trainer", None, 1))
    frame = zstandard.ZstdCompressor().compress(bytes(64))
    planes = len(frame).to_bytes(4, "little") + frame
    sizes = {"taken_bytes": value_charge_bytes(len(planes)), "encoded_bytes": len(planes), "logical_bytes": 64}
    many_planes = _sound_location(codec="shuffle-zstd", itemsize_bytes=10**6, **sizes)
    return [
        b"",
        _entry(0, 1, many_planes) + _entry(1, 1, planes),
        _entry(0, 1, _sound_location()) + _entry(1, 1, value),
        _entry(0, 1, _sound_location(checksum=5)) + _entry(1, 1, value) + _entry(1, 2, value),
        _entry(0, 1, _sound_location()),
        _entry(0, 1, extent) + _entry(0, 2, twin) + _entry(2, 3, lease),
        _entry(0, 1, extent.replace(b"\x04\x00\xc0", b"\x04\x05\xc0")),  # a head, where nothing is aligned
        _entry(0, 1, extent) + _entry(3, 2, bytes([2, 0, 5, 8, 8, 0, 0, 2, 0, 0])),
        _entry(0, 1, extent[:-1]) + _entry(0x80, 3, b"x"),
        _entry(0, 1, b"\xdc\x00\x0b" + extent[1:] + b"\x91" * 100),
    ]


def _lease_seeds() -> list[bytes]:
    lease = msgspec.msgpack.encode(Lease(3, bytes(32), 0, "trainer", None, 1))
    sound = bytes([3, len(lease)]) + lease
    return [
        sound,
        b"\0\1\4" + sound,
        b"\0\1\3" + sound,
        b"\0\1\xff" + sound,
        b"\4" + sound[1:],
        sound[:-1],
        b"",
        b"\3\xff\x86" + b"\x91" * 2000,
    ]


def _format_seeds() -> list[bytes]:
    return [b"", b"{}", b"!", b"!\0[", b"!" + bytes([63, 45]), b"[" * 3000, b"\xff", b"null", b'{"x":' + b"[" * 3000]


TARGETS = (
    Target("index_records", _run_index, _index_seeds, result_bytes=8 * 2**20),  # what `_entries` makes of few bytes
    Target("leases", _run_leases, _lease_seeds),
    Target("format_file", _run_format, _format_seeds),
)

"""Encoded values: what is damaged is refused, in any split; what was encoded comes back."""

import os
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from tests.fuzz.target import Target, raises
from tierstore.disk.codec.codec import BITS, BLOCK_BYTES, CONSTANT, BlockDecoder, Codec, DamagedBytesError
from tierstore.disk.encoded_records import ChunkWriter, decode_value, encode_record, encode_value, read_encoded
from tierstore.disk.location import FileRange, WriteOrder
from tierstore.disk.scratch import Scratch

__all__ = ["TARGETS", "small_scratch"]

_CODECS = (Codec("zstd", 1), Codec("shuffle-zstd", 1), BITS, Codec("zstd", -3), Codec("shuffle-zstd", 3), CONSTANT)
_ITEMSIZES = (1, 2, 4, 8, 3, 16, 1024, 5)
_LENGTHS = (0, 1, 7, 8, 9, 64, 4096, 65_537, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 5)
_MOST_LOGICAL_BYTES = _LENGTHS[-1]
_HEADER_BYTES = 4
_READ_BYTES = 16  # of a chunk: so every block of more than that is carried over


class _Case(NamedTuple):
    """How the rest of an input is to be read."""

    codec: Codec
    itemsize_bytes: int
    logical_bytes: int
    cuts: int
    rest: bytes


def _case(data: bytes) -> _Case:
    head, rest = data[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0"), data[_HEADER_BYTES:]
    return _Case(
        _CODECS[head[0] % len(_CODECS)],
        _ITEMSIZES[head[1] % len(_ITEMSIZES)],
        _LENGTHS[head[2]] if head[2] < len(_LENGTHS) else head[2],
        head[3],
        rest,
    )


class _Bench(NamedTuple):
    """What all runs share: memory is allocated once, so that what an input allocates is its own."""

    scratch: Scratch
    small: Scratch
    middling: Scratch
    destinations: tuple[bytearray, bytearray, bytearray]
    descriptor: int


@cache
def _bench() -> _Bench:
    destinations = tuple(bytearray(_MOST_LOGICAL_BYTES) for _ in range(3))
    bench = _Bench(Scratch(), small_scratch(_READ_BYTES), small_scratch(60_000), destinations, os.memfd_create("fuzz"))  # type: ignore[arg-type]
    for scratch in bench[:3]:
        for codec in _CODECS:  # loads the codecs' modules, and makes their contexts
            if codec not in (BITS, CONSTANT):
                scratch.workspace.compressor(codec.level)
        decode = BlockDecoder(memoryview(bytearray(1)), _CODECS[0], 1, scratch.workspace)
        raises(DamagedBytesError, lambda decode=decode: decode.feed(memoryview(b"\1\0\0\0\0")))
    _encode(bytes(4096), _Case(_CODECS[1], 2, 0, 0, b""), bench)
    for codec in (BITS, CONSTANT):
        _encode(bytes(4096), _Case(codec, 1, 0, 0, b""), bench)
    return bench


def small_scratch(read_bytes: int) -> Scratch:
    """Working memory whose chunk takes so many bytes at once, behind the room for the block that was cut."""
    scratch = Scratch()
    carry_bytes = -(-(BLOCK_BYTES + 4) // 4096) * 4096
    scratch.chunk = scratch.chunk[: carry_bytes + read_bytes]
    return scratch


def _run_decode(data: bytes) -> None:
    """In one piece, in pieces, and from a file in small chunks: the same bytes or the same refusal."""
    case, bench = _case(data), _bench()
    views = [memoryview(each)[: case.logical_bytes] for each in bench.destinations]
    ways: tuple[Callable[[memoryview], None], ...] = (
        lambda view: decode_value(memoryview(case.rest), _decoder(case, view, bench.scratch)),
        lambda view: _decode_in_pieces(case, view, bench.scratch),
        lambda view: _decode_file(case, view, bench),
    )
    refusals = [
        raises(DamagedBytesError, lambda way=way, view=view: way(view)) for way, view in zip(ways, views, strict=True)
    ]
    assert len({refusal is None for refusal in refusals}) == 1, f"it depends on the pieces: {refusals}"
    if refusals[0] is None:
        assert views[0] == views[1] == views[2]


def _decoder(case: _Case, view: memoryview, scratch: Scratch) -> BlockDecoder:
    return BlockDecoder(view, case.codec, case.itemsize_bytes, scratch.workspace)


def _decode_in_pieces(case: _Case, view: memoryview, scratch: Scratch) -> None:
    decoder = _decoder(case, view, scratch)
    step = max(1, case.cuts, len(case.rest) // 64)
    pending = b""
    for start in range(0, len(case.rest), step):
        pending += case.rest[start : start + step]
        pending = pending[decoder.feed(memoryview(pending)) :]
    if pending or not decoder.is_complete:
        raise DamagedBytesError("a whole record", f"{len(pending)} bytes left over")


def _decode_file(case: _Case, view: memoryview, bench: _Bench) -> None:
    os.ftruncate(bench.descriptor, 0)
    os.pwrite(bench.descriptor, case.rest, 0)
    place = FileRange(bench.descriptor, 0, len(case.rest), 1)
    read_encoded(place, len(case.rest), _decoder(case, view, bench.small), None, bench.small)


def _run_round_trip(data: bytes) -> None:
    """Any content, as a value and as an extent; the content is the rest of the input, several times over."""
    case, bench = _case(data), _bench()
    times = max(1, case.logical_bytes // max(1, len(case.rest))) if case.cuts % 2 else 1
    source = (case.rest * times)[:_MOST_LOGICAL_BYTES]
    if source:
        _encode(source, case, bench)


def _encode(source: bytes, case: _Case, bench: _Bench) -> None:
    order = WriteOrder(case.codec, case.itemsize_bytes, None, False)
    found = memoryview(bench.destinations[0])[: len(source)]
    value = encode_value(memoryview(source), order, bench.scratch)
    if value is not None:
        assert len(value) < len(source), "a value that did not shrink"
        decode_value(memoryview(value), _decoder(case, found, bench.scratch))
        assert found == source
    os.ftruncate(bench.descriptor, 0)
    writer = ChunkWriter(bench.descriptor, 0, bench.middling, None)
    if encode_record(memoryview(source), order, writer, len(source), bench.middling):
        encoded_bytes = writer.encoded_bytes
        writer.finish()
        found[:] = bytes(len(found))
        place = FileRange(bench.descriptor, 0, encoded_bytes, 1)
        read_encoded(place, encoded_bytes, _decoder(case, found, bench.middling), None, bench.middling)
        assert found == source


def _encoded_seeds() -> list[bytes]:
    seeds = [
        b"",
        b"\0\0\1\0\1\0\0\x80x",
        b"\0\0\1\0\1\0\0\x80xy",
        b"\2\0\4\0\2\0\0\0\xff\x80",
        b"\2\0\4\0\3\0\0\0\xff\x80\0",
    ]
    scratch = Scratch()
    for number, codec in enumerate(_CODECS):
        for length in (64, 4096):
            order = WriteOrder(codec, 4, None, False)
            value = encode_value(memoryview(bytes(at // 16 % 2 for at in range(length))), order, scratch)
            if value is not None:
                head = bytes([number, 2, _LENGTHS.index(length), 3])
                seeds += [head + value, head + value[:-1], head + value + b"\0"]
    return seeds


def _content_seeds() -> list[bytes]:
    contents = (b"\0" * 64, b"\1\0" * 40, bytes(range(256)), b"x", b"\0\0\x80\x3f" * 20)
    return [bytes([codec, 2, 11, 1]) + content for codec in range(len(_CODECS)) for content in contents]


TARGETS = (
    Target("encoded_values", _run_decode, _encoded_seeds, (b"\x28\xb5\x2f\xfd", b"\0\0\0\x80")),
    Target("encoded_round_trip", _run_round_trip, _content_seeds, (), 3 * _MOST_LOGICAL_BYTES),
)

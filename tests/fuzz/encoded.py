"""Encoded values: what is damaged is refused, in any split."""

import os
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from tests.fuzz.target import Target, raises
from tierstore.disk.codec.choice import WriteOrder
from tierstore.disk.codec.codec import BITS, BLOCK_BYTES, CONSTANT, FLOATS, BlockDecoder, Codec, DamagedBytesError
from tierstore.disk.location import FileRange
from tierstore.disk.records import decode_value, read_encoded, write_encoded
from tierstore.disk.scratch import Scratch

__all__ = ["TARGETS", "small_scratch"]

_ZSTDS = (Codec("zstd", 1), Codec("shuffle-zstd", 1), Codec("zstd", -3), Codec("shuffle-zstd", 3))
_CODECS = (*_ZSTDS, BITS, CONSTANT, FLOATS)
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
    destinations: tuple[bytearray, bytearray, bytearray]
    descriptor: int


@cache
def _bench() -> _Bench:
    destinations = tuple(bytearray(_MOST_LOGICAL_BYTES) for _ in range(3))
    bench = _Bench(Scratch(), small_scratch(_READ_BYTES), destinations, os.memfd_create("fuzz"))  # type: ignore[arg-type]
    for scratch in bench[:2]:  # loads the codecs' modules, and makes their contexts
        decode = BlockDecoder(memoryview(bytearray(1)), _CODECS[0], 1, scratch.workspace)
        raises(DamagedBytesError, lambda decode=decode: decode.feed(memoryview(b"\1\0\0\0\0")))
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


def _encoded_seeds() -> list[bytes]:
    seeds = [
        b"",
        b"\0\0\1\0\1\0\0\x80x",
        b"\0\0\1\0\1\0\0\x80xy",
        b"\4\0\4\0\2\0\0\0\xff\x80",
        b"\4\0\4\0\3\0\0\0\xff\x80\0",
    ]
    scratch = Scratch()
    for number, codec in enumerate(_CODECS):
        for length in (64, 4096):
            order = WriteOrder(codec, 4, None, False)
            source = memoryview(bytes(at // 16 % 2 for at in range(length)))
            written = write_encoded(None, source, order, scratch)
            if written is not None and written.value is not None:
                value = bytes(written.value)
                head = bytes([number, 2, _LENGTHS.index(length), 3])
                seeds += [head + value, head + value[:-1], head + value + b"\0"]
    return seeds


TARGETS = (Target("encoded_values", _run_decode, _encoded_seeds, (b"\x28\xb5\x2f\xfd", b"\0\0\0\x80")),)

"""Codecs: every option, every length, every kind of damage."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.disk.codec.codec import (
    BITS,
    BLOCK_BYTES,
    CONSTANT,
    ENCODED_BLOCK_BYTES,
    FLOATS,
    NO_CODEC,
    BlockDecoder,
    Codec,
    DamagedBytesError,
    Workspace,
    blocks_of,
    encode_block,
    parse_codec,
)
from tierstore.disk.codec.family import join_planes, split_planes
from tierstore.errors import ConfigError

CODECS = [
    BITS,
    CONSTANT,
    FLOATS,
    Codec("zstd", 1),
    Codec("zstd", -5),
    Codec("zstd", 9),
    Codec("shuffle-zstd", 1),
    Codec("shuffle-zstd", 3),
]


def workspace() -> Workspace:
    return Workspace(memoryview(bytearray(BLOCK_BYTES)))


def encode(content: bytes, codec: Codec, itemsize: int) -> bytes:
    out, encoded, space = memoryview(bytearray(ENCODED_BLOCK_BYTES)), bytearray(), workspace()
    for block in blocks_of(memoryview(content)):
        encoded += out[: encode_block(block, out, codec, itemsize, space)]
    return bytes(encoded)


def decode(encoded: bytes, num_bytes: int, codec: Codec, itemsize: int, step: int) -> bytes:
    destination = bytearray(num_bytes)
    decoder = BlockDecoder(memoryview(destination), codec, itemsize, workspace())
    pending = b""
    for start in range(0, len(encoded), step):
        pending += encoded[start : start + step]
        pending = pending[decoder.feed(memoryview(pending)) :]
    if pending or not decoder.is_complete:
        raise DamagedBytesError("all", "a part")
    return bytes(destination)


def mixed_bytes(num_bytes: int) -> bytes:
    half = num_bytes // 2
    return random.Random(num_bytes).randbytes(half) + bytes(num_bytes - half)


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("auto", None),
        ("none", NO_CODEC),
        ("zstd", Codec("zstd", 1)),
        ("zstd:22", Codec("zstd", 22)),
        ("zstd:-7", Codec("zstd", -7)),
        ("shuffle-zstd", Codec("shuffle-zstd", 1)),
        ("shuffle-zstd:3", Codec("shuffle-zstd", 3)),
        ("floats", FLOATS),
    ],
)
def test_parse_codec_reads_every_form(text: str, codec: Codec | None) -> None:
    assert parse_codec(text) == codec
    if codec is not None:
        assert parse_codec(str(codec)) == codec


@pytest.mark.parametrize(
    "text", ["", "lz4", "zstd:", "zstd:23", "zstd:0", "zstd:1.5", "none:1", "floats:1", "ZSTD", "zstd:-999999", None, 3]
)
def test_parse_codec_refuses_and_names_it(text: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_codec(text)  # type: ignore[arg-type]
    assert repr(text) in str(caught.value)
    assert '"shuffle-zstd:LEVEL"' in str(caught.value)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("num_bytes", [1, 3, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5])
def test_encode_then_decode_is_the_same(codec: Codec, num_bytes: int) -> None:
    for content in (mixed_bytes(num_bytes), bytes(num_bytes), mask_bytes(num_bytes)):
        encoded = encode(content, codec, 4)
        for step in (len(encoded), 100_003, *([1] if num_bytes < 5000 else [])):
            assert decode(encoded, num_bytes, codec, 4, step) == content


@given(content=st.binary(min_size=1, max_size=300), itemsize=st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_planes_join_to_what_was_split(content: bytes, itemsize: int) -> None:
    planes, joined = bytearray(len(content)), bytearray(len(content))
    split_planes(memoryview(content), memoryview(planes), itemsize)
    join_planes(memoryview(planes), memoryview(joined), itemsize)
    assert joined == content
    count = len(content) // itemsize
    assert planes[:count] == content[: count * itemsize : itemsize]


def test_incompressible_block_grows_by_its_header_only() -> None:
    content = random.Random(1).randbytes(BLOCK_BYTES)
    assert len(encode(content, Codec("zstd", 1), 1)) == ENCODED_BLOCK_BYTES


def mask_bytes(num_bytes: int) -> bytes:
    return bytes(byte & 1 for byte in random.Random(num_bytes).randbytes(num_bytes))


@pytest.mark.parametrize("num_bytes", [2, 7, 8, 9, 4001, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 77])
def test_masks_take_a_bit_for_each_byte(num_bytes: int) -> None:
    content = mask_bytes(num_bytes)
    encoded = encode(content, BITS, 1)
    num_blocks = -(-num_bytes // BLOCK_BYTES)
    assert len(encoded) <= num_bytes // 8 + 5 * num_blocks
    assert decode(encoded, num_bytes, BITS, 1, 4 + BLOCK_BYTES) == content


ONE, WORD = b"\0\0\x80\x3f", bytes(range(8))


@pytest.mark.parametrize("unit", [b"\0", ONE, WORD], ids=["zeros", "ones", "words"])
@pytest.mark.parametrize("num_bytes", [9, 15, 16, 4001, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 77])
def test_one_value_takes_a_word_for_each_block(unit: bytes, num_bytes: int) -> None:
    content = (unit * num_bytes)[:num_bytes]
    encoded = encode(content, CONSTANT, 4)
    assert len(encoded) == -(-num_bytes // BLOCK_BYTES) * (4 + 8)
    assert decode(encoded, num_bytes, CONSTANT, 4, 5) == content
    unlike = content[:-1] + b"x"  # a block need not be a multiple of a word
    assert decode(encode(unlike, CONSTANT, 4), num_bytes, CONSTANT, 4, 10_000) == unlike


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_block_longer_than_its_record_is_refused_before_it_is_there(codec: Codec) -> None:
    """Nobody has room to wait for it in."""
    decoder = BlockDecoder(memoryview(bytearray(1000)), codec, 4, workspace())
    with pytest.raises(DamagedBytesError, match="one of 1001 bytes"):
        decoder.feed(memoryview((1001).to_bytes(4, "little")))


def frame_of_gigabytes() -> bytes:
    import zstandard

    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = compressor.compress(bytes(1000)) + compressor.flush()
    return len(frame).to_bytes(4, "little") + frame


def plain_block(num_bytes: int, flag: int = 0) -> bytes:
    return (num_bytes | flag).to_bytes(4, "little") + bytes(num_bytes)


ZSTD = Codec("zstd", 1)


@pytest.mark.parametrize(
    ("codec", "encoded", "num_bytes", "said"),
    [
        *((BITS, encode(mask_bytes(1000), BITS, 1), number, f"{number} bits") for number in (991, 992, 1001)),
        (CONSTANT, plain_block(0), 1000, "a block of 1 to 1000 bytes"),
        *((CONSTANT, plain_block(number), 1000, "a word of 8 bytes") for number in (7, 9)),
        *(
            (codec, plain_block(number, 1 << 31), 1000, "a block of 1000 bytes")
            for codec in CODECS
            for number in (1, 999)
        ),
        *((ZSTD, encode(bytes(1000), ZSTD, 1), number, "bytes in a zstd frame") for number in (999, 1001)),
        (ZSTD, frame_of_gigabytes(), 1000, "zstd frame"),
    ],
)
def test_block_of_another_length_is_refused(codec: Codec, encoded: bytes, num_bytes: int, said: str) -> None:
    with pytest.raises(DamagedBytesError, match=said):
        decode(encoded, num_bytes, codec, 4, 10_000)

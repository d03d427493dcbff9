"""Packed floats: every bit pattern comes back, in numpy and in C, and what is damaged is refused or garbage.

`pip install ./native` builds the part in C; without it its tests are skipped.
"""

import ctypes
import mmap
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.disk.codec import floats, probing
from tierstore.disk.codec.codec import BLOCK_BYTES, ENCODED_BLOCK_BYTES, FLOATS, Workspace, encode_block
from tierstore.disk.linux import address_of
from tierstore.disk.scratch import Scratch

WAYS = ("numpy", "native")
NATIVE = pytest.mark.skipif(
    not hasattr(floats.tierstore_native, "pack_floats"), reason="tierstore-native, with packed floats, is not installed"
)
BOTH_WAYS = pytest.mark.parametrize("way", ["numpy", pytest.param("native", marks=NATIVE)])
BF16, FP32 = 2, 4
ALL_BF16 = np.arange(2**16, dtype="<u2")


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(floats.SWITCH, "1" if way == "native" else "0")
    assert floats.has_native() is (way == "native")


def pack(content: bytes, itemsize: int) -> bytes | None:
    room = memoryview(bytearray(len(content)))
    used = floats.pack(memoryview(content), room, itemsize, memoryview(bytearray(len(content))))
    return None if used is None else bytes(room[:used])


def unpack(packed: bytes, num_bytes: int, itemsize: int) -> bytes | None:
    block = bytearray(b"\x07" * num_bytes)
    is_sound = floats.unpack(memoryview(packed), memoryview(block), itemsize, memoryview(bytearray(num_bytes)))
    return bytes(block) if is_sound else None


def as_bytes(values: np.ndarray, itemsize: int) -> bytes:
    """Of float32 values; as bfloat16 if an element has two bytes."""
    bits = values.astype("<f4").view("<u4")
    return (bits if itemsize == FP32 else (bits >> 16).astype("<u2")).tobytes()


def activations(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype("<f4")


def hidden_among(odd: np.ndarray, itemsize: int) -> bytes:
    """These bit patterns, at random places of what is packed well."""
    content = np.frombuffer(as_bytes(activations(32 * 2**10 * 4 // itemsize), itemsize), odd.dtype).copy()
    places = np.random.default_rng(1).choice(len(content), len(odd), replace=False)
    content[places] = odd
    return content.tobytes()


@BOTH_WAYS
@pytest.mark.parametrize("start", range(0, 2**16, 2**12))
def test_every_bfloat16_comes_back(way: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    content = hidden_among(ALL_BF16[start : start + 2**12], BF16)
    packed = pack(content, BF16)
    assert packed is not None
    assert unpack(packed, len(content), BF16) == content


@BOTH_WAYS
def test_every_bfloat16_comes_back_among_zeros(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    content = np.zeros(2**18, "<u2")
    content[np.random.default_rng(0).permutation(2**18)[: 2**16]] = ALL_BF16
    content[::3] = 0x3F80
    packed = pack(content.tobytes(), BF16)
    assert packed is not None
    assert len(packed) < content.nbytes
    assert unpack(packed, content.nbytes, BF16) == content.tobytes()


PATTERNS_A_BLOCK = BLOCK_BYTES // FP32
BLOCKS_OF_ALL = 2**32 // PATTERNS_A_BLOCK


@pytest.mark.parametrize(
    ("way", "step"),
    [
        ("numpy", 256),
        pytest.param("native", 256, marks=NATIVE),
        pytest.param("native", 4, marks=[NATIVE, pytest.mark.slow]),
        pytest.param("numpy", 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.timeout(1800)
def test_float32_of_all_kinds_come_back(way: str, step: int, zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A billion different patterns, from all exponents, in steps of 4 blocks; 17 millions in steps of 256."""
    use(way, monkeypatch)
    room, workspace, found = (memoryview(bytearray(BLOCK_BYTES)) for _ in range(3))
    block, neighbours = np.zeros(PATTERNS_A_BLOCK, "<u4"), np.arange(PATTERNS_A_BLOCK >> zeros, dtype="<u4")
    patterns = block[::2] if zeros else block
    for number in range(0, BLOCKS_OF_ALL << zeros, step):
        np.add(neighbours, number * len(neighbours), out=patterns)  # one exponent
        patterns[number % 8 :: 8] *= np.uint32(0x9E3779B1)  # odd, so all stay different; any exponent
        content = memoryview(block).cast("B")
        used = floats.pack(content, room, FP32, workspace)
        assert used is not None, number
        assert floats.unpack(room[:used], found, FP32, workspace), number
        assert found == content, number


@BOTH_WAYS
@given(
    count=st.integers(1, 1500).map(lambda eighths: 8 * eighths),
    itemsize=st.sampled_from([BF16, FP32]),
    zeros=st.sampled_from([0.0, 0.1, 0.5, 0.99, 1.0]),
    odd=st.sampled_from([0.0, 0.02, 0.3]),
    exponent=st.integers(-45, 37),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_packed_comes_back(
    way: str, count: int, itemsize: int, zeros: float, odd: float, exponent: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    values = activations(count, seed) * np.float32(10.0**exponent)
    content = np.frombuffer(as_bytes(values, itemsize), f"<u{itemsize}").copy()
    is_odd = generator.random(count) < odd
    content[is_odd] = generator.integers(0, 2 ** (8 * itemsize), int(is_odd.sum()), dtype=content.dtype)
    content[generator.random(count) < zeros] = 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(way, monkeypatch)
        packed = pack(content.tobytes(), itemsize)
        if packed is not None:
            assert unpack(packed, content.nbytes, itemsize) == content.tobytes()


@BOTH_WAYS
@pytest.mark.parametrize("itemsize", [BF16, FP32])
@pytest.mark.parametrize("width", range(1, 8))
def test_codes_of_every_width_come_back(way: str, width: int, itemsize: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    generator = np.random.default_rng(width)
    bits = generator.integers(0, 2**32, 16 * 4096 + 72, dtype="<u4") & 0x807FFFFF
    bits |= generator.integers(1, 2**width, len(bits), dtype="<u4") << 23
    bits[::2] = 0
    content = as_bytes(bits.view("<f4"), itemsize)
    packed = pack(content, itemsize)
    assert packed is not None
    assert packed[0] == width
    assert unpack(packed, len(content), itemsize) == content


@NATIVE
@pytest.mark.parametrize("itemsize", [BF16, FP32])
@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("count", [4096, 4104, 12_288, 50_000, 128 * 2**10])
def test_both_ways_write_the_same_bytes(
    itemsize: int, zeros: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = activations(count)
    values[np.random.default_rng(0).random(count) < zeros] = 0
    content, packed = as_bytes(values, itemsize), {}
    for way in WAYS:
        use(way, monkeypatch)
        packed[way] = pack(content, itemsize)
        assert unpack(packed[way] or b"", len(content), itemsize) == content
    assert packed["numpy"] == packed["native"]
    use("numpy", monkeypatch)
    assert unpack(packed["native"] or b"", len(content), itemsize) == content


@BOTH_WAYS
@pytest.mark.parametrize("itemsize", [BF16, FP32])
def test_random_bytes_stay_as_they_are(way: str, itemsize: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    content = random.Random(0).randbytes(BLOCK_BYTES)
    assert pack(content, itemsize) is None
    room = memoryview(bytearray(ENCODED_BLOCK_BYTES))
    space = Workspace(memoryview(bytearray(BLOCK_BYTES)))
    assert encode_block(memoryview(content), room, FLOATS, itemsize, space) == ENCODED_BLOCK_BYTES


@BOTH_WAYS
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_block_of_other_elements_stays_as_it_is(way: str, itemsize: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    content = as_bytes(activations(4096), FP32)
    if itemsize in floats.FLOAT_BYTES:
        content = content[:-itemsize]  # no longer a multiple of eight elements
    assert pack(content, itemsize) is None
    assert unpack(b"\3\x78\0\0" + bytes(100), len(content), itemsize) is None


@BOTH_WAYS
@pytest.mark.parametrize(("itemsize", "zeros", "ratio"), [(BF16, 0.0, 1.4), (FP32, 0.0, 1.15), (FP32, 0.6, 2.6)])
def test_numbers_alike_shrink(
    way: str, itemsize: int, zeros: float, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(way, monkeypatch)
    values = activations(BLOCK_BYTES // itemsize)
    values[np.random.default_rng(0).random(len(values)) < zeros] = 0
    packed = pack(as_bytes(values, itemsize), itemsize)
    assert packed is not None
    assert len(packed) * ratio < BLOCK_BYTES


def damaged(packed: bytes, longest: int) -> Iterator[bytes]:
    """If it is short, each byte changed twice, and cut everywhere. Then a few bytes of the header, or of all, set to
    others; or cut; or longer, up to `longest`."""
    if len(packed) < 2**10:
        for place in range(len(packed)):
            for change in (1 << place % 8, 0xFF):
                yield packed[:place] + bytes([packed[place] ^ change]) + packed[place + 1 :]
            yield packed[:place]
    choice = random.Random(0)
    for _ in range(300):
        mutated = bytearray(packed)
        for _ in range(choice.randint(1, 3)):
            mutated[choice.randrange(choice.choice([8, len(mutated)]))] = choice.randrange(256)
        cut = choice.choice([choice.randrange(len(mutated)), len(mutated), len(mutated)])
        yield bytes(mutated[:cut])
        yield bytes(mutated + choice.randbytes(choice.randint(1, 9)))[:longest]


def before_a_wall(num_bytes: int) -> memoryview:
    """Zeros that end with a page behind which a read or a write ends the process."""
    length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = memoryview(mmap.mmap(-1, length + mmap.PAGESIZE))
    wall = ctypes.c_void_p(address_of(whole) + length)
    assert ctypes.CDLL(None).mprotect(wall, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return whole[length - num_bytes : length]


@pytest.mark.parametrize("itemsize", [BF16, FP32])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
@pytest.mark.parametrize("count", [256, 4504])
def test_damaged_bytes_are_refused_or_fill_the_block_alone(
    itemsize: int, zeros: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both ways alike. A checksum finds what is not refused. Nothing is read or written beside the buffers."""
    values = activations(count)
    values[np.random.default_rng(0).random(count) < zeros] = 0
    content = as_bytes(values, itemsize)
    whole, workspace, memory = (before_a_wall(len(content) + 32) for _ in range(3))
    ways = WAYS if hasattr(floats.tierstore_native, "pack_floats") else WAYS[:1]
    packed = pack(content, itemsize)
    assert packed is not None
    for other in damaged(packed, len(content)):
        payload = whole[len(whole) - len(other) :]
        payload[:] = other
        for num_bytes in (len(content), len(content) - 8 * itemsize):
            found = set()
            for way in ways if len(payload) <= num_bytes else ():
                use(way, monkeypatch)
                memory[:] = b"\x55" * len(memory)
                is_sound = floats.unpack(payload, memory[len(memory) - num_bytes :], itemsize, workspace[-num_bytes:])
                assert memory[: len(memory) - num_bytes] == b"\x55" * (len(memory) - num_bytes)
                found.add(bytes(memory) if is_sound else None)
            assert len(found) <= 1, (other[:8], num_bytes)


@BOTH_WAYS
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_every_part_of_the_format_is_checked(way: str, zeros: float, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    values = activations(4096)
    values[np.random.default_rng(0).random(len(values)) < zeros] = 0
    packed = pack(as_bytes(values, BF16), BF16)
    assert packed is not None
    others = [packed[:length] for length in (0, 7, 8, len(packed) - 1)] + [packed + b"\0"]
    for place, value in ((0, 0), (0, 8), (0, 7), (2, 2), (2, 1 - packed[2]), (3, 1), (4, packed[4] ^ 1), (7, 1)):
        others.append(packed[:place] + bytes([value]) + packed[place + 1 :])
    if zeros:
        others.append(packed[:8] + bytes([packed[8] ^ 1]) + packed[9:])
    for other in others:
        assert unpack(other, 2 * len(values), BF16) is None, other[:8]


@BOTH_WAYS
def test_auto_tries_it_only_where_it_is_fast(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    content = memoryview(torch.randn(2**18).bfloat16().view(torch.uint8).numpy())
    tried = [sample.codec for sample in probing.probe(content, BF16, Scratch())]
    assert (FLOATS in tried) is (way == "native")
    assert FLOATS not in [sample.codec for sample in probing.probe(content, 8, Scratch())]

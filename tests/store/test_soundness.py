"""Records of a found index that cannot be right: plain values in, ranges or an error out."""

import msgspec
import pytest

from tierstore.disk.codec.codec import DamagedBytesError
from tierstore.disk.file_layout import spans_of
from tierstore.disk.location import Location

BLOCK = 4096


def extent(offset: int, blocks: int, segment: int = 0) -> Location:
    return Location(segment, offset * BLOCK, blocks * BLOCK, blocks * BLOCK, blocks * BLOCK, "none", 0, 1, 0, None)


def encoded(itemsize_bytes: int) -> Location:
    return Location(0, 0, BLOCK, 9, 4000, "shuffle-zstd", 1, itemsize_bytes, 0, None)


@pytest.mark.parametrize("itemsize_bytes", [1, 1024])
def test_every_itemsize_of_a_record_is_right(itemsize_bytes: int) -> None:
    assert spans_of({1: encoded(itemsize_bytes)}, {0: BLOCK}) == {0: {0: BLOCK}}


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 2**40},
        {"offset": -4096},
        {"offset": 1},
        {"offset": None},
        {"segment": 99},
        {"taken_bytes": 4096},
        {"taken_bytes": 2**30},
        {"codec": "lz4"},
        {"head_bytes": 5000},
        {"logical_bytes": 3},
    ],
    ids=str,
)
def test_entry_that_cannot_be_right_is_damage(change: dict[str, object]) -> None:
    damaged = msgspec.structs.replace(extent(2, 2), **change)
    with pytest.raises(DamagedBytesError):
        spans_of({1: damaged, 2: extent(0, 2)}, {0: 16 * BLOCK})


@pytest.mark.parametrize("itemsize_bytes", [0, 1025, 2**63])
def test_itemsize_that_no_record_has_is_damage(itemsize_bytes: int) -> None:
    """Decoding takes a turn of a loop for each byte of an element."""
    with pytest.raises(DamagedBytesError):
        spans_of({1: encoded(itemsize_bytes)}, {0: BLOCK})


@pytest.mark.parametrize(
    ("extents", "is_sound"),
    [
        ([(0, 2), (2, 2), (4, 1)], True),
        ([(15, 1), (0, 15)], True),
        ([(0, 2), (1, 2), (4, 1)], False),
        ([(0, 8), (1, 1), (8, 1)], False),
        ([(3, 1), (3, 1)], False),
        ([(0, 16), (15, 1)], False),
        ([(0, 17)], False),
    ],
)
def test_records_that_overlap_are_damage(extents: list[tuple[int, int]], is_sound: bool) -> None:
    locations = {key: extent(*each) for key, each in enumerate(extents)}
    elsewhere = {100 + key: extent(*each, segment=1) for key, each in enumerate([(0, 1), (1, 15)])}
    lengths = {0: 16 * BLOCK, 1: 16 * BLOCK, 2: 16 * BLOCK}
    if not is_sound:
        with pytest.raises(DamagedBytesError):
            spans_of(locations | elsewhere, lengths)
        return
    found = {each * BLOCK: blocks * BLOCK for each, blocks in extents}
    assert spans_of(locations | elsewhere, lengths) == {0: found, 1: {0: BLOCK, BLOCK: 15 * BLOCK}}

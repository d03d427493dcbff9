"""Records of a found index that cannot be right: plain values in, plain values out."""

import msgspec
import pytest

from tierstore.disk.location import Location
from tierstore.disk.soundness import drop_unsound

BLOCK = 4096


def extent(offset: int, blocks: int, segment: int = 0) -> Location:
    return Location(segment, offset * BLOCK, blocks * BLOCK, blocks * BLOCK, blocks * BLOCK, "none", 0, 1, 0, None)


@pytest.mark.parametrize(
    ("itemsize_bytes", "is_kept"), [(0, False), (1, True), (1024, True), (1025, False), (2**63, False)]
)
def test_itemsize_that_no_record_has_is_dropped(itemsize_bytes: int, is_kept: bool) -> None:
    """Decoding takes a turn of a loop for each byte of an element."""
    locations = {1: Location(0, 0, BLOCK, 9, 4000, "shuffle-zstd", 1, itemsize_bytes, 0, None)}
    assert drop_unsound(locations, {0: BLOCK})[1] == ([] if is_kept else [1])


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
def test_entry_that_cannot_be_right_is_dropped(change: dict[str, object]) -> None:
    damaged = msgspec.structs.replace(extent(2, 2), **change)
    assert drop_unsound({1: damaged, 2: extent(0, 2)}, {0: 16 * BLOCK})[1] == [1]


@pytest.mark.parametrize(
    ("extents", "dropped"),
    [
        ([(0, 2), (2, 2), (4, 1)], []),
        ([(0, 2), (1, 2), (4, 1)], [0, 1]),
        ([(0, 8), (1, 1), (3, 1), (8, 1)], [0, 1, 2]),
        ([(0, 2), (1, 3), (3, 2), (5, 1)], [0, 1, 2]),
        ([(3, 1), (3, 1), (3, 2), (4, 1)], [0, 1, 2, 3]),
        ([(0, 16), (15, 1)], [0, 1]),
        ([(0, 17)], [0]),
        ([(15, 1), (0, 15)], []),
    ],
)
def test_none_of_those_that_overlap_is_kept(extents: list[tuple[int, int]], dropped: list[int]) -> None:
    locations = {key: extent(*each) for key, each in enumerate(extents)}
    elsewhere = {100 + key: extent(*each, segment=1) for key, each in enumerate([(0, 1), (1, 15)])}
    locations |= elsewhere
    spans, unsound = drop_unsound(locations, {0: 16 * BLOCK, 1: 16 * BLOCK, 2: 16 * BLOCK})
    assert unsound == dropped
    assert sorted(locations) == [key for key in range(len(extents)) if key not in dropped] + [100, 101]
    kept = {each * BLOCK: blocks * BLOCK for key, (each, blocks) in enumerate(extents) if key not in dropped}
    assert spans == {1: {0: BLOCK, BLOCK: 15 * BLOCK}} | ({0: kept} if kept else {})

"""Decides which records in the index of an earlier process can be right. Pure. The others are forgotten; one that only
looks right is found out by its checksum when it is read."""

from __future__ import annotations

from collections.abc import Mapping

from .allocator import ALIGNMENT_BYTES, round_up
from .budget import value_charge_bytes
from .codec.codec import NO_CODEC
from .codec.family import FAMILIES
from .location import Location

_MOST_ITEMSIZE_BYTES = 1024  # as in the protocol's `Write`; decoding makes a pass for each byte of it
_FAMILIES = frozenset((NO_CODEC.family, *FAMILIES))

Spans = dict[int, dict[int, int]]
"""The ranges in use, by the number of their segment: offset -> length. Segments without records are left out."""


def drop_unsound(locations: dict[int, Location], segment_bytes: Mapping[int, int]) -> tuple[Spans, list[int]]:
    """Remove from `locations` all records that cannot be right; returns the ranges of the others, and the keys removed.
    Records that overlap are all removed: nobody knows which of them was written last. `segment_bytes`: the length of
    each segment file that is there, by number."""
    unsound = {key for key, location in locations.items() if not _could_be_right(location, segment_bytes)}
    extents = sorted(
        (location.segment, location.offset, key)
        for key, location in locations.items()
        if key not in unsound and location.segment is not None and location.offset is not None
    )
    last_segment, end, owner = -1, 0, 0
    for segment, offset, key in extents:
        if segment == last_segment and offset < end:
            unsound.update((key, owner))
        key_end = offset + locations[key].taken_bytes
        if segment != last_segment or key_end > end:
            last_segment, end, owner = segment, key_end, key
    for key in unsound:
        del locations[key]
    spans: Spans = {}
    for segment, offset, key in extents:
        if key not in unsound:
            spans.setdefault(segment, {})[offset] = locations[key].taken_bytes
    return spans, sorted(unsound)


def _could_be_right(location: Location, segment_bytes: Mapping[int, int]) -> bool:
    encoded_bytes, taken_bytes, offset = location.encoded_bytes, location.taken_bytes, location.offset
    if encoded_bytes < 0 or location.logical_bytes < 0 or location.codec not in _FAMILIES:
        return False
    if not 1 <= location.itemsize_bytes <= _MOST_ITEMSIZE_BYTES:
        return False
    if location.codec == NO_CODEC.family and location.logical_bytes != encoded_bytes:
        return False
    if location.segment is None:
        return taken_bytes == value_charge_bytes(encoded_bytes)
    if offset is None or offset < 0 or offset % ALIGNMENT_BYTES or not 0 <= location.head_bytes < ALIGNMENT_BYTES:
        return False
    is_snug = taken_bytes == max(round_up(encoded_bytes), ALIGNMENT_BYTES)
    return is_snug and offset + taken_bytes <= segment_bytes.get(location.segment, 0)

"""Decides whether the records in the index of an earlier process can be right. Pure. A record that only looks right is
found out by its checksum when it is read."""

from __future__ import annotations

from collections.abc import Mapping

from .allocator import ALIGNMENT_BYTES, round_up
from .budget import value_charge_bytes
from .codec.codec import NO_CODEC
from .codec.family import FAMILIES, DamagedBytesError
from .location import Location

_MOST_ITEMSIZE_BYTES = 1024  # as in the protocol's `Write`; decoding makes a pass for each byte of it
_FAMILIES = frozenset((NO_CODEC.family, *FAMILIES))

Spans = dict[int, dict[int, int]]
"""The ranges in use, by the number of their segment: offset -> length. Segments without records are left out."""


def spans_of(locations: Mapping[int, Location], segment_bytes: Mapping[int, int]) -> Spans:
    """The ranges of all records. DamagedBytesError: one of them cannot be right, or two overlap. `segment_bytes`: the
    length of each segment file that is there, by number."""
    extents = []
    for key, location in locations.items():
        if not _could_be_right(location, segment_bytes):
            raise DamagedBytesError(f"a place of record {key} that there is", str(location))
        if location.segment is not None and location.offset is not None:
            extents.append((location.segment, location.offset, location.taken_bytes))
    spans: Spans = {}
    for segment, offset, num_bytes in sorted(extents):
        of_segment = spans.setdefault(segment, {})
        if of_segment and offset < (end := sum(next(reversed(of_segment.items())))):
            raise DamagedBytesError(f"records of segment {segment} that do not overlap", f"{offset} before {end}")
        of_segment[offset] = num_bytes
    return spans


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

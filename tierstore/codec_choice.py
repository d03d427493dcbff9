"""Which codec a record gets under "auto": figures in, a decision out. Pure: no clock, no compression, no I/O.

Encoding pays only if it takes less time than it saves::

    raw      n/W + n/R                       W, R: the disk's bytes per second, all transfers together
    encoded  n·e + n·r/W + n·r/R + n·d       r: ratio; e, d: seconds one core spends per byte

and must be clearly below, because those core seconds are also taken from the training beside it. Where a
figure is missing, nothing is encoded. Near the end of the disk budget the best ratio wins whatever it costs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .codec import NO_CODEC, Codec, is_shrinking
from .disk.tier import Kind

__all__ = ["Choice", "CodecChooser", "Sample", "candidates"]

_SMALLEST_PROBED_BYTES = 64 * 2**10
_PROBE_EVERY_RECORDS = 256
_PROBE_EVERY_BYTES = 64 * 2**20  # a probe costs about a millisecond: below 2 % of what it rides on
_SWITCH_BELOW = 0.8  # of the raw time: clearly faster
_STAY_BELOW = 0.9
_NEWEST_WEIGHT = 0.25
_SMALLEST_TIMED_BYTES = 2**20  # shorter transfers time the system call, not the disk
_MOST_KINDS = 1024


class Sample(NamedTuple):
    """What a codec did to some bytes of a record.

    Attributes:
        codec: the candidate.
        raw_bytes: before.
        encoded_bytes: after.
        encode_seconds: of one core; likewise `decode_seconds`.
    """

    codec: Codec
    raw_bytes: int
    encoded_bytes: int
    encode_seconds: float
    decode_seconds: float


class Choice(NamedTuple):
    """What to do with a record: the codec, and whether to probe it on the way (for those that follow)."""

    codec: Codec
    probe: bool


class _KindClass(NamedTuple):
    """Records that are decided on together: of one kind, and within a factor of two in size."""

    kind: Kind
    size_class: int

    @classmethod
    def of(cls, kind: Kind, num_bytes: int) -> _KindClass:
        """The class of a record."""
        return cls(kind, num_bytes.bit_length())


@dataclass(slots=True)
class _Figures:
    """Moving averages of one codec on one class."""

    ratio: float
    encode_seconds_per_byte: float
    decode_seconds_per_byte: float

    def learn(self, ratio: float, encode: float, decode: float | None) -> None:
        self.ratio = _blend(self.ratio, ratio)
        self.encode_seconds_per_byte = _blend(self.encode_seconds_per_byte, encode)
        if decode is not None:
            self.decode_seconds_per_byte = _blend(self.decode_seconds_per_byte, decode)


@dataclass(slots=True)
class _ClassState:
    """What is known of one class."""

    codec: Codec = NO_CODEC
    records_since_probe: int = 0
    bytes_since_probe: int = 0
    is_probed: bool = False
    figures: dict[Codec, _Figures] = field(default_factory=dict)


def candidates(itemsize_bytes: int) -> tuple[Codec, ...]:
    """The codecs that "auto" tries; byte planes only where an element has several bytes."""
    plain = Codec("zstd", 1)
    return (plain, Codec("shuffle-zstd", 1)) if itemsize_bytes > 1 else (plain,)


class CodecChooser:
    """Decides and learns. Not thread-safe (its owner is one loop); bounded in memory."""

    def __init__(self) -> None:
        self._classes: OrderedDict[_KindClass, _ClassState] = OrderedDict()
        self._write_bytes_per_second: float | None = None
        self._read_bytes_per_second: float | None = None

    def choose(self, kind: Kind, num_bytes: int, *, is_space_short: bool) -> Choice:
        """Decide on the next record."""
        if num_bytes < _SMALLEST_PROBED_BYTES and not is_space_short:
            return Choice(NO_CODEC, probe=False)
        state = self._state_of(kind, num_bytes)
        state.records_since_probe += 1
        state.bytes_since_probe += num_bytes
        state.codec = self._smallest(state, kind) if is_space_short else self._fastest(state)
        return Choice(state.codec, self._is_probe_due(state, num_bytes))

    def learn_samples(self, kind: Kind, num_bytes: int, samples: Iterable[Sample]) -> None:
        """Take in what a probe of a record found."""
        state = self._state_of(kind, num_bytes)
        for sample in samples:
            state.is_probed = True
            self._learn(
                state,
                sample.codec,
                sample.encoded_bytes / sample.raw_bytes,
                sample.encode_seconds / sample.raw_bytes,
                sample.decode_seconds / sample.raw_bytes,
            )

    def learn_written(self, kind: Kind, num_bytes: int, codec: Codec, encoded_bytes: int, seconds: float) -> None:
        """Take in a record for which `codec` was chosen; `encoded_bytes`: its full length if in vain."""
        if codec != NO_CODEC and num_bytes:
            state = self._state_of(kind, num_bytes)
            self._learn(state, codec, encoded_bytes / num_bytes, seconds / num_bytes, None)

    def learn_decoded(self, kind: Kind, num_bytes: int, codec: Codec, seconds: float) -> None:
        """Take in how long one core decoded a record of `num_bytes`."""
        figures = self._state_of(kind, num_bytes).figures.get(codec)
        if figures is not None and num_bytes:
            per_byte = _blend(figures.decode_seconds_per_byte, seconds / num_bytes)
            figures.decode_seconds_per_byte = per_byte

    def learn_write_speed(self, num_bytes: int, seconds: float, num_at_once: int) -> None:
        """Take in a transfer to disk, and how many shared the disk meanwhile."""
        self._write_bytes_per_second = _newer_speed(self._write_bytes_per_second, num_bytes, seconds, num_at_once)

    def learn_read_speed(self, num_bytes: int, seconds: float, num_at_once: int) -> None:
        """Likewise from disk."""
        self._read_bytes_per_second = _newer_speed(self._read_bytes_per_second, num_bytes, seconds, num_at_once)

    def _state_of(self, kind: Kind, num_bytes: int) -> _ClassState:
        place = _KindClass.of(kind, num_bytes)
        state = self._classes.setdefault(place, _ClassState())
        self._classes.move_to_end(place)
        if len(self._classes) > _MOST_KINDS:
            self._classes.popitem(last=False)
        return state

    def _is_probe_due(self, state: _ClassState, num_bytes: int) -> bool:
        often = state.records_since_probe >= _PROBE_EVERY_RECORDS
        due = not state.is_probed or (often and state.bytes_since_probe >= _PROBE_EVERY_BYTES)
        if not due or num_bytes < _SMALLEST_PROBED_BYTES:
            return False
        state.is_probed = True  # one at a time, also while many records of the class are in flight
        state.records_since_probe = state.bytes_since_probe = 0
        return True

    def _learn(self, state: _ClassState, codec: Codec, ratio: float, encode: float, decode: float | None) -> None:
        figures = state.figures.get(codec)
        if figures is not None:
            figures.learn(ratio, encode, decode)
        else:
            state.figures[codec] = _Figures(ratio, encode, encode if decode is None else decode)

    def _fastest(self, state: _ClassState) -> Codec:
        write = self._write_bytes_per_second
        if write is None or not state.figures:
            return NO_CODEC
        disk_seconds = 1 / write + 1 / (self._read_bytes_per_second or write)
        costs = {codec: _cost(figures, disk_seconds) for codec, figures in state.figures.items()}
        best = min(costs, key=lambda codec: costs[codec])
        threshold = _STAY_BELOW if best == state.codec else _SWITCH_BELOW
        return best if costs[best] < threshold * disk_seconds else NO_CODEC

    def _smallest(self, state: _ClassState, kind: Kind) -> Codec:
        if not state.figures:
            return candidates(kind.itemsize_bytes)[0]  # tried blind: the encoder stops early if it is in vain
        best = min(state.figures, key=lambda codec: state.figures[codec].ratio)
        return best if is_shrinking(int(state.figures[best].ratio * 2**20), 2**20) else NO_CODEC


def _cost(figures: _Figures, disk_seconds: float) -> float:
    coding_seconds = figures.encode_seconds_per_byte + figures.decode_seconds_per_byte
    return coding_seconds + figures.ratio * disk_seconds


def _newer_speed(known: float | None, num_bytes: int, seconds: float, num_at_once: int) -> float | None:
    if num_bytes < _SMALLEST_TIMED_BYTES or seconds <= 0:
        return known
    speed = num_bytes / seconds * max(1, num_at_once)
    return speed if known is None else _blend(known, speed)


def _blend(known: float, newest: float) -> float:
    return known + _NEWEST_WEIGHT * (newest - known)

"""Chooses the codec of a record under "auto", from measured figures. Pure: no clock, no compression, no I/O.

The codec with the least cost wins, by the formula in `figures.py`. Where a figure is missing, nothing is encoded.
Near the end of the disk budget the best ratio wins whatever it costs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..tier import Kind
from .codec import BITS, CONSTANT, NO_CODEC, Codec, is_shrinking
from .figures import UNKNOWN_LOAD, CodecFigures, DriveFigures, Load, Sample

__all__ = ["SMALLEST_PROBED_BYTES", "Choice", "CodecChooser", "candidates"]

SMALLEST_PROBED_BYTES = 64 * 2**10
"""Shorter records are not encoded unless space is short."""

_FAST_ZSTD, _ZSTD, _SHUFFLE_ZSTD = Codec("zstd", -3), Codec("zstd", 1), Codec("shuffle-zstd", 1)
_CHEAPEST_FIRST = (CONSTANT, BITS, _FAST_ZSTD, _ZSTD, _SHUFFLE_ZSTD)
_PROBE_AFTER_RECORDS = (4, 16, 64, 256)  # the first of a kind may be unlike the others; then ever more seldom
_PROBE_AFTER_BYTES = 64 * 2**20  # a probe costs some milliseconds at most: below 2 % of the work on these bytes
_TRIAL_AFTER_RECORDS = (16, 64, 256)  # encoded ones, before raw ones show again what the disk can do
_TRIAL_RECORDS = 4
_SWITCH_BELOW = 0.9  # of the cost of what is done now: a gain that is not just noise
_WORST_RATIO = 15 / 16
_SAME_RATIO = 1 / 64  # of the bytes: a codec that saves less than this beyond a cheaper one is not used
_MOST_KINDS = 1024


class Choice(NamedTuple):
    """How to write a record.

    Attributes:
        codec: how to encode it.
        worst_ratio: encoding stops, and the record is stored as it is, if its ratio turns out to be above this.
        probe: try the candidates on the way, for the records that follow.
    """

    codec: Codec
    worst_ratio: float
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
class _ClassState:
    """The state of one class: its codec, its figures, and when its next probe and trial are due."""

    codec: Codec = NO_CODEC
    records_since_probe: int = 0
    bytes_since_probe: int = 0
    num_probes: int = 0
    encoded_since_trial: int = 0
    trial_records_left: int = 0
    num_trials: int = 0
    figures: dict[Codec, CodecFigures] = field(default_factory=dict)


def candidates(itemsize_bytes: int) -> tuple[Codec, ...]:
    """The codecs that "auto" tries, the cheapest first; byte planes only where an element has several bytes."""
    if itemsize_bytes == 1:
        return CONSTANT, BITS, _ZSTD
    return CONSTANT, _FAST_ZSTD, _ZSTD, _SHUFFLE_ZSTD


class CodecChooser:
    """Decides and learns. Not thread-safe (its owner is one loop); bounded in memory."""

    def __init__(self, num_lanes: int = 4) -> None:
        """`num_lanes`: how many records are written, or read, at once."""
        self._drive = DriveFigures(num_lanes)
        self._classes: OrderedDict[_KindClass, _ClassState] = OrderedDict()
        self._load = UNKNOWN_LOAD  # as of the last choice

    def choose(self, kind: Kind, num_bytes: int, load: Load, *, is_space_short: bool) -> Choice:
        """Decide on the next record."""
        self._load = load
        if num_bytes < SMALLEST_PROBED_BYTES and not is_space_short:
            return Choice(NO_CODEC, _WORST_RATIO, probe=False)
        state = self._state_of(kind, num_bytes)
        state.records_since_probe += 1
        state.bytes_since_probe += num_bytes
        probe = self._is_probe_due(state, num_bytes)
        if is_space_short:
            return Choice(self._smallest(state, kind), _WORST_RATIO, probe)
        state.codec = self._cheapest(state, load)
        if state.codec == NO_CODEC or self._is_trial_due(state, load):
            return Choice(NO_CODEC, _WORST_RATIO, probe)
        return Choice(state.codec, min(_WORST_RATIO, (1 + state.figures[state.codec].ratio) / 2), probe)

    def learn_samples(self, kind: Kind, num_bytes: int, samples: Iterable[Sample]) -> None:
        """Take in what a probe of a record found."""
        state = self._state_of(kind, num_bytes)
        for sample in samples:
            if (figures := state.figures.get(sample.codec)) is not None:
                figures.forget_waits()
            self._learn(
                state,
                sample.codec,
                sample.encoded_bytes / sample.raw_bytes,
                sample.encode_seconds / sample.raw_bytes,
                sample.decode_seconds / sample.raw_bytes,
            )

    def learn_written(
        self,
        kind: Kind,
        num_bytes: int,
        codec: Codec,
        encoded_bytes: int,
        seconds: float,
        lane_seconds: float | None = None,
    ) -> None:
        """Take in a record for which `codec` was chosen.

        Args:
            kind: the record's.
            num_bytes: its length.
            codec: what was ordered, "none" too.
            encoded_bytes: its length on disk; its full length if encoding was in vain.
            seconds: of CPU, for everything that writing it took.
            lane_seconds: from the first byte to the last, while others had their turns too; None: not known.
        """
        if num_bytes < SMALLEST_PROBED_BYTES:
            return
        if codec == NO_CODEC:
            self._drive.learn_raw_write(seconds / num_bytes)
        else:
            state = self._state_of(kind, num_bytes)
            ratio = encoded_bytes / num_bytes
            self._learn(state, codec, ratio, seconds / num_bytes, None)
            if lane_seconds is not None:
                figures = state.figures[codec]
                self._drive.learn_write_wait(figures, ratio, seconds / num_bytes, lane_seconds / num_bytes, self._load)

    def learn_read(
        self, kind: Kind, num_bytes: int, codec: Codec, seconds: float, lane_seconds: float | None = None
    ) -> None:
        """Take in the CPU seconds that reading a record took; the other arguments are those of `learn_written`."""
        if num_bytes < SMALLEST_PROBED_BYTES:
            return
        if codec == NO_CODEC:
            self._drive.learn_raw_read(seconds / num_bytes)
        elif (figures := self._state_of(kind, num_bytes).figures.get(codec)) is not None:
            figures.learn_decoding(seconds / num_bytes)
            if lane_seconds is not None:
                self._drive.learn_read_wait(figures, seconds / num_bytes, lane_seconds / num_bytes, self._load)

    def learn_write_speed(self, bytes_per_second: float, *, is_lower_bound: bool = False) -> None:
        """Take in how fast the disk wrote of late; a lower bound if the disk was not fully used."""
        self._drive.learn_write_speed(bytes_per_second, is_lower_bound=is_lower_bound)

    def learn_read_speed(self, bytes_per_second: float, *, is_lower_bound: bool = False) -> None:
        """Take in how fast the disk read of late; a lower bound if the disk was not fully used."""
        self._drive.learn_read_speed(bytes_per_second, is_lower_bound=is_lower_bound)

    def disk_seconds(self, written_bytes: int, read_bytes: int) -> float | None:
        """Seconds that the disk needs for these bytes, unencoded; None: its speed is not known yet."""
        return self._drive.disk_seconds(written_bytes, read_bytes)

    def _state_of(self, kind: Kind, num_bytes: int) -> _ClassState:
        place = _KindClass.of(kind, num_bytes)
        state = self._classes.setdefault(place, _ClassState())
        self._classes.move_to_end(place)
        if len(self._classes) > _MOST_KINDS:
            self._classes.popitem(last=False)
        return state

    def _is_probe_due(self, state: _ClassState, num_bytes: int) -> bool:
        if num_bytes < SMALLEST_PROBED_BYTES:
            return False
        if state.num_probes:
            after = _PROBE_AFTER_RECORDS[min(state.num_probes, len(_PROBE_AFTER_RECORDS)) - 1]
            if state.records_since_probe < after or state.bytes_since_probe < _PROBE_AFTER_BYTES:
                return False
        state.num_probes += 1
        state.records_since_probe = state.bytes_since_probe = 0
        return True

    def _is_trial_due(self, state: _ClassState, load: Load) -> bool:
        """Whether to write a record raw as a trial: if all are encoded, a disk that was slow once seems slow for ever.

        A trial is due only if it may matter: if raw records would be the better choice on a disk twice as fast.
        """
        if state.trial_records_left:
            state.trial_records_left -= 1
            return True
        state.encoded_since_trial += 1
        after = _TRIAL_AFTER_RECORDS[min(state.num_trials, len(_TRIAL_AFTER_RECORDS) - 1)]
        if state.encoded_since_trial < after:
            return False
        write, read = self._drive.seconds_per_byte()
        faster = (write / 2, read / 2)
        if self._drive.cost(state.figures[state.codec], load, faster) < self._drive.cost(None, load, faster):
            return False
        state.num_trials += 1
        state.encoded_since_trial, state.trial_records_left = 0, _TRIAL_RECORDS - 1
        return True

    def _learn(self, state: _ClassState, codec: Codec, ratio: float, encode: float, decode: float | None) -> None:
        figures = state.figures.get(codec)
        if figures is not None:
            figures.learn(ratio, encode, decode)
        else:
            state.figures[codec] = CodecFigures(ratio, encode, encode if decode is None else decode)

    def _cheapest(self, state: _ClassState, load: Load) -> Codec:
        if not self._drive.is_speed_known or not state.figures:
            return NO_CODEC
        shrinking = {codec: figures for codec, figures in state.figures.items() if figures.ratio < _WORST_RATIO}
        disk = self._drive.seconds_per_byte()
        costs = {codec: self._drive.cost(figures, load, disk) for codec, figures in _undominated(shrinking).items()}
        costs[NO_CODEC] = self._drive.cost(None, load, disk)
        best = min(costs, key=lambda codec: costs[codec])
        present = state.codec if state.codec in costs else NO_CODEC
        if costs[best] >= _SWITCH_BELOW * costs[present]:
            best = present
        return best if costs[best] < costs[NO_CODEC] else NO_CODEC

    def _smallest(self, state: _ClassState, kind: Kind) -> Codec:
        tried = {codec: figures.ratio for codec, figures in state.figures.items()}
        if not tried:
            return candidates(kind.itemsize_bytes)[-1]  # not measured yet; the encoder stops early if it is in vain
        best = min(tried, key=lambda codec: tried[codec])
        return best if is_shrinking(int(tried[best] * 2**20), 2**20) else NO_CODEC


def _undominated(figures: Mapping[Codec, CodecFigures]) -> dict[Codec, CodecFigures]:
    """The codecs that shrink more than every cheaper one.

    Which codec is cheaper is known beforehand. Measured times do not tell: a codec that was only tried on a sample,
    which is in the cache, looks cheaper than one that has encoded whole records.
    """
    found: dict[Codec, CodecFigures] = {}
    for codec in sorted(figures, key=_CHEAPEST_FIRST.index):
        if all(figures[codec].ratio < cheaper.ratio - _SAME_RATIO for cheaper in found.values()):
            found[codec] = figures[codec]
    return found

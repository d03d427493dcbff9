"""Chooses the codec of a record under "auto": how codecs did on samples, against the drive. Pure.

The codec with the least cost wins. Where a figure is missing, nothing is encoded::

    moving   raw      n/W + n/R                  W, R: the disk's bytes per second, all transfers together
             encoded  n·max(r/W, e/p + r/(k·W), s) + n·max(r/R, d/p + r/(k·R), s)
                      r: ratio; e, d: CPU seconds per byte to encode and decode; p: cores that are free for it;
                      k: records that are moved at once; s: for how long records were on their way down, per byte of
                      all k, because threads also wait for the interpreter
    cost  =  demand · moving  +  price · n·(e + d)

*demand* is how busy the disk would be if nothing were encoded: where training leaves it idle most of the time, faster
moving gains nothing. *price* is the share of the CPU seconds that is taken from training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..tier import Kind
from .codec import BITS, CONSTANT, FLOATS, NO_CODEC, Codec
from .floats import FLOAT_BYTES

SMALLEST_PROBED_BYTES = 64 * 2**10
"""Shorter records are not encoded unless space is short."""
WORST_RATIO = 15 / 16
"""Bytes are encoded only if less than this share of them is left."""

_FAST_ZSTD, _ZSTD, _SHUFFLE_ZSTD = Codec("zstd", -3), Codec("zstd", 1), Codec("shuffle-zstd", 1)
_CHEAPEST_FIRST = (CONSTANT, BITS, FLOATS, _FAST_ZSTD, _ZSTD, _SHUFFLE_ZSTD)
_MOST_PROBED_APART = 256  # records; at first they are closer: the first of a kind may be unlike the others
_PROBE_AFTER_BYTES = 64 * 2**20  # a probe costs some milliseconds at most: below 2 % of the work on these bytes
_TRIAL_AFTER_RECORDS, _TRIAL_RECORDS = 64, 4
_SWITCH_BELOW = 0.9  # of the cost of what is done now: a gain that is not just noise
_SAME_RATIO = 1 / 64  # of the bytes: a codec that saves less than this beyond a cheaper one is not used
_MOST_KINDS = 1024
_LEAST_PRICE = 0.1  # of a CPU second: encoding on idle cores still takes memory bandwidth and power
_LEAST_CORES = 0.5  # that encoding gets if none are free: it waits for its turn
_SHARED_CORES = 0.5  # of the idle ones: a busy training leaves cores idle for moments too short for a job
_NEWEST_WEIGHT = 0.25
_MOST_WAY_GROWTH = 2.0  # by one record


class WriteOrder(NamedTuple):
    """How to write a record. `codec`: how to encode it, as long as that shrinks it. `itemsize_bytes`: the byte planes'
    stride. `seed`: of the checksum; None: make none. `probe`: also try the candidates of "auto" on a sample.
    `worst_ratio`: the bytes are stored as they are if the ratio is above this."""

    codec: Codec
    itemsize_bytes: int
    seed: int | None = None
    probe: bool = False
    worst_ratio: float = WORST_RATIO


class Load(NamedTuple):
    """The machine's load of late, without the store's own encoding: `demand` as above, and the cores that nobody else
    used."""

    demand: float
    free_cores: float


UNKNOWN_LOAD = Load(1.0, 0.0)
"""Every byte and every CPU second counts, so a record is encoded only if that gains on any machine."""


class Sample(NamedTuple):
    """How a codec did on `raw_bytes` of a record, in seconds of one core."""

    codec: Codec
    raw_bytes: int
    encoded_bytes: int
    encode_seconds: float
    decode_seconds: float


class _Figures(NamedTuple):
    """Moving averages of a codec on records that are alike; the seconds are per byte."""

    ratio: float
    encode_seconds: float
    decode_seconds: float


@dataclass(slots=True)
class _Class:
    """Records of one kind, and within a factor of two in size. `way_seconds`: for how long encoded ones were on their
    way down, per byte of all lanes; fades with each probe, because no other record would show that waits are over."""

    codec: Codec = NO_CODEC
    records_since_probe: int = 0
    bytes_since_probe: int = 0
    num_probes: int = 0
    num_encoded: int = 0
    way_seconds: float = 0.0
    figures: dict[Codec, _Figures] = field(default_factory=dict)

    def is_probe_due(self, num_bytes: int, num_records: int) -> bool:
        self.records_since_probe += num_records
        self.bytes_since_probe += num_bytes * num_records
        is_early = self.records_since_probe < min(4**self.num_probes, _MOST_PROBED_APART)
        if num_bytes < SMALLEST_PROBED_BYTES:
            return False
        if self.num_probes and (is_early or self.bytes_since_probe < _PROBE_AFTER_BYTES):
            return False
        self.num_probes += 1
        self.records_since_probe = self.bytes_since_probe = 0
        return True


def candidates(itemsize_bytes: int) -> tuple[Codec, ...]:
    """The codecs that "auto" tries; byte planes only where an element has several bytes."""
    if itemsize_bytes == 1:
        return CONSTANT, BITS, _ZSTD
    if itemsize_bytes in FLOAT_BYTES:
        return CONSTANT, FLOATS, _FAST_ZSTD, _ZSTD, _SHUFFLE_ZSTD
    return CONSTANT, _FAST_ZSTD, _ZSTD, _SHUFFLE_ZSTD


class CodecChooser:
    """Decides and learns; for one loop; bounded in memory. `num_lanes`: how many records are written, or read, at
    once."""

    def __init__(self, num_lanes: int = 4) -> None:
        self._num_lanes = num_lanes
        self._speeds: dict[str, float] = {}  # bytes per second, by direction
        self._classes: dict[tuple[Kind, int], _Class] = {}

    def choose(self, kind: Kind, num_bytes: int, load: Load, *, is_space_short: bool, num_alike: int = 1) -> WriteOrder:
        """Decide on the next record. Where space is short, the best ratio wins whatever it costs. `num_alike`: so many
        of its class were written since it was asked, this one included; the others as they were."""
        raw = WriteOrder(NO_CODEC, max(1, kind.itemsize_bytes))
        if num_bytes < SMALLEST_PROBED_BYTES and not is_space_short:
            return raw
        found = self._class_of(kind, num_bytes)
        raw = raw._replace(probe=found.is_probe_due(num_bytes, num_alike))
        if is_space_short:
            return raw._replace(codec=_smallest(found, kind))
        found.codec = self._cheapest(found, load)
        if found.codec == NO_CODEC or self._is_trial(found, load):
            return raw
        worst_ratio = min(WORST_RATIO, (1 + found.figures[found.codec].ratio) / 2)
        return raw._replace(codec=found.codec, worst_ratio=worst_ratio)

    def learn_samples(self, kind: Kind, num_bytes: int, samples: Iterable[Sample]) -> None:
        found = self._class_of(kind, num_bytes)
        figures = found.figures
        for codec, raw_bytes, encoded_bytes, encode_seconds, decode_seconds in samples:
            newest = _Figures(encoded_bytes / raw_bytes, encode_seconds / raw_bytes, decode_seconds / raw_bytes)
            known = figures.get(codec, newest)
            figures[codec] = _Figures(*(_blend(old, new) for old, new in zip(known, newest, strict=True)))
        found.way_seconds = _blend(found.way_seconds, 0.0)

    def learn_written(
        self, kind: Kind, num_bytes: int, codec: Codec, encoded_bytes: int, lane_seconds: float | None = None
    ) -> None:
        """Take in a record for which `codec` was chosen; `encoded_bytes`: its full length if that was in vain.
        `lane_seconds`: from its first byte to its last. One that met a stall counts as the time of unencoded bytes at
        most; only repeated ones count for more."""
        found = self._class_of(kind, num_bytes)
        if (known := found.figures.get(codec)) is not None:
            found.figures[codec] = known._replace(ratio=_blend(known.ratio, encoded_bytes / num_bytes))
        if lane_seconds is not None:
            most_seconds = max(self.disk_seconds(1, 0) or 0.0, _MOST_WAY_GROWTH * found.way_seconds)
            way_seconds = lane_seconds / num_bytes / self._num_lanes
            found.way_seconds = _blend(found.way_seconds, min(way_seconds, most_seconds))

    def learn_speed(self, direction: str, bytes_per_second: float) -> None:
        """Take in how fast the disk was of late; `direction`: "write" or "read"."""
        self._speeds[direction] = _blend(self._speeds.get(direction, bytes_per_second), bytes_per_second)

    def disk_seconds(self, written_bytes: int, read_bytes: int) -> float | None:
        """Seconds that the disk needs for these bytes, unencoded; None: its speed is not known yet."""
        if (write_speed := self._speeds.get("write")) is None:
            return None
        return written_bytes / write_speed + read_bytes / self._speeds.get("read", write_speed)

    def _class_of(self, kind: Kind, num_bytes: int) -> _Class:
        if len(self._classes) >= _MOST_KINDS and (kind, num_bytes.bit_length()) not in self._classes:
            del self._classes[next(iter(self._classes))]
        return self._classes.setdefault((kind, num_bytes.bit_length()), _Class())

    def _cheapest(self, found: _Class, load: Load) -> Codec:
        if "write" not in self._speeds:
            return NO_CODEC
        costs = {NO_CODEC: self._cost(found, None, load)}
        least_ratio = WORST_RATIO
        for codec in _CHEAPEST_FIRST:
            figures = found.figures.get(codec)
            if figures is not None and figures.ratio < least_ratio:
                costs[codec] = self._cost(found, figures, load)
                least_ratio = figures.ratio - _SAME_RATIO
        best = min(costs, key=costs.__getitem__)
        present = found.codec if found.codec in costs else NO_CODEC
        if costs[best] >= _SWITCH_BELOW * costs[present]:
            best = present
        return best if costs[best] < costs[NO_CODEC] else NO_CODEC

    def _is_trial(self, found: _Class, load: Load) -> bool:
        """Whether to write a record raw as a trial: if all are encoded, a disk that was slow once seems slow for ever.
        Only if raw records would be the better choice on a disk twice as fast."""
        found.num_encoded += 1
        if found.num_encoded % _TRIAL_AFTER_RECORDS >= _TRIAL_RECORDS or found.num_encoded < _TRIAL_AFTER_RECORDS:
            return False
        figures = found.figures[found.codec]
        return self._cost(found, None, load, faster=2) < self._cost(found, figures, load, faster=2)

    def _cost(self, found: _Class, figures: _Figures | None, load: Load, faster: float = 1) -> float:
        """Seconds of training that it costs to write and read a byte; `faster`: on a disk so many times as fast."""
        write = 1 / self._speeds["write"] / faster
        read = 1 / self._speeds.get("read", self._speeds["write"]) / faster
        if figures is None:
            return load.demand * (write + read)
        cores = min(max(load.free_cores, _LEAST_CORES), self._num_lanes)
        moving_seconds = 0.0
        for disk, cpu in ((write, figures.encode_seconds), (read, figures.decode_seconds)):
            disk *= figures.ratio
            moving_seconds += max(disk, cpu / cores + disk / self._num_lanes, found.way_seconds)
        cpu_seconds = figures.encode_seconds + figures.decode_seconds
        wanted_cores = max(1.0, cpu_seconds / moving_seconds)
        price = max(_LEAST_PRICE, 1 - max(0.0, load.free_cores - _SHARED_CORES) / wanted_cores)
        return load.demand * moving_seconds + price * cpu_seconds


def _smallest(found: _Class, kind: Kind) -> Codec:
    if not found.figures:
        return candidates(kind.itemsize_bytes)[-1]  # not measured yet; the encoder stops early if it is in vain
    best = min(found.figures, key=lambda codec: found.figures[codec].ratio)
    return best if found.figures[best].ratio < WORST_RATIO else NO_CODEC


def _blend(known: float, newest: float) -> float:
    return known + _NEWEST_WEIGHT * (newest - known)

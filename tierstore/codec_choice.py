"""Which codec a record gets under "auto": figures in, a decision out. Pure: no clock, no compression, no I/O.

A record costs time in two ways, and what each is worth depends on what else the machine is doing::

    moving   raw      n/W + n/R                  W, R: the disk's bytes per second, all transfers together
             encoded  n·max(r/W, e/p + r/(k·W) + s) + n·max(r/R, d/p + r/(k·R) + t)
                      r: ratio; e, d: CPU seconds per byte to write and to read it, beyond those of an unencoded one;
                      p: cores that are free for it; k: records that are moved at once;
                      s, t: for how much longer than that the k were on their way, per byte of them all
    cost  =  demand · moving  +  price · n·(e + d)

*demand* is how busy the disk would be if nothing were encoded: where training leaves it idle most of the time,
moving is hidden and faster moving gains nothing. *price* is the share of the CPU seconds that is taken from
training: nearly nothing where cores are idle, all of it where training keeps them busy.

Where a figure is missing, nothing is encoded. Near the end of the disk budget the best ratio wins whatever it costs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .codec import BITS, CONSTANT, NO_CODEC, Codec, is_shrinking
from .disk.tier import Kind

__all__ = ["SMALLEST_PROBED_BYTES", "UNKNOWN_LOAD", "Choice", "CodecChooser", "Load", "Sample", "candidates"]

SMALLEST_PROBED_BYTES = 64 * 2**10
"""Shorter records are not encoded unless space is short."""

_FAST_ZSTD, _ZSTD, _SHUFFLE_ZSTD = Codec("zstd", -3), Codec("zstd", 1), Codec("shuffle-zstd", 1)
_CHEAPEST_FIRST = (CONSTANT, BITS, _FAST_ZSTD, _ZSTD, _SHUFFLE_ZSTD)
_PROBE_AFTER_RECORDS = (4, 16, 64, 256)  # the first of a kind may be unlike the others; then ever more seldom
_PROBE_AFTER_BYTES = 64 * 2**20  # a probe costs some milliseconds at most: below 2 % of what it rides on
_TRIAL_AFTER_RECORDS = (16, 64, 256)  # encoded ones: then raw ones show what the disk can do now
_TRIAL_RECORDS = 4
_SWITCH_BELOW = 0.9  # of the cost of what is done now: a gain that is not just noise
_LEAST_PRICE = 0.1  # of a CPU second: encoding on idle cores still takes memory bandwidth and power
_LEAST_CORES = 0.5  # that encoding gets where none are free: it waits for its turn
_SHARED_CORES = 0.5  # of the idle ones: a busy training's cores are idle for moments that no job fits into
_NEWEST_WEIGHT = 0.25
_MOST_GROWTH = 1.5  # of a CPU time at once: a single record may have paid for fresh pages
_MOST_WAIT_GROWTH = 2.0  # likewise of a wait: it may have met a stall
_WORST_RATIO = 15 / 16
_SAME_RATIO = 1 / 64  # of the bytes: a cheaper codec that leaves hardly more is better, whatever their times seem to be
_MOST_KINDS = 1024


class Load(NamedTuple):
    """What the machine was doing lately, without the store's own encoding.

    Attributes:
        demand: share of the time that the disk would be busy if nothing were encoded, 0 to 1.
        free_cores: how many cores nobody else used.
    """

    demand: float
    free_cores: float


UNKNOWN_LOAD = Load(1.0, 0.0)
"""Every byte and every CPU second counts: only what gains on any machine is encoded."""


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
    """What to do with a record.

    Attributes:
        codec: how to encode it.
        worst_ratio: encoding stops, and the record is stored as it is, where it turns out to shrink less than this.
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
class _Figures:
    """Moving averages of one codec on one class; CPU seconds.

    The waits are what records were on their way beyond what CPU seconds on free cores and the disk account for: for a
    core behind the store's other threads, and for the interpreter. Seconds per byte, of all lanes together.
    """

    ratio: float
    encode_seconds_per_byte: float
    decode_seconds_per_byte: float
    write_wait: float = 0.0
    read_wait: float = 0.0

    def learn(self, ratio: float, encode: float, decode: float | None) -> None:
        self.ratio = _blend(self.ratio, ratio)
        self.encode_seconds_per_byte = _blend_cpu(self.encode_seconds_per_byte, encode)
        if decode is not None:
            self.decode_seconds_per_byte = _blend_cpu(self.decode_seconds_per_byte, decode)

    def forget_waits(self) -> None:
        """By and by: what is not encoded any more would never show that its way is free again."""
        self.write_wait, self.read_wait = _blend(self.write_wait, 0.0), _blend(self.read_wait, 0.0)


@dataclass(slots=True)
class _ClassState:
    """What is known of one class."""

    codec: Codec = NO_CODEC
    records_since_probe: int = 0
    bytes_since_probe: int = 0
    num_probes: int = 0
    encoded_since_trial: int = 0
    trial_records_left: int = 0
    num_trials: int = 0
    figures: dict[Codec, _Figures] = field(default_factory=dict)


def candidates(itemsize_bytes: int) -> tuple[Codec, ...]:
    """The codecs that "auto" tries, the cheapest first; byte planes only where an element has several bytes."""
    if itemsize_bytes == 1:
        return CONSTANT, BITS, _ZSTD
    return CONSTANT, _FAST_ZSTD, _ZSTD, _SHUFFLE_ZSTD


class CodecChooser:
    """Decides and learns. Not thread-safe (its owner is one loop); bounded in memory."""

    def __init__(self, num_lanes: int = 4) -> None:
        """`num_lanes`: how many records are written, or read, at once."""
        self._num_lanes = num_lanes
        self._classes: OrderedDict[_KindClass, _ClassState] = OrderedDict()
        self._write_bytes_per_second: float | None = None
        self._read_bytes_per_second: float | None = None
        self._raw_write_seconds: float | None = None  # of CPU, per byte; likewise to read
        self._raw_read_seconds: float | None = None
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
            self._raw_write_seconds = _least(self._raw_write_seconds, seconds / num_bytes)
        else:
            state = self._state_of(kind, num_bytes)
            ratio = encoded_bytes / num_bytes
            self._learn(state, codec, ratio, seconds / num_bytes, None)
            figures = state.figures[codec]
            if lane_seconds is not None:
                encode_seconds = _beyond(seconds / num_bytes, self._raw_write_seconds)
                write, _ = self._disk_seconds_per_byte()
                figures.write_wait = self._newer_wait(
                    figures.write_wait, lane_seconds / num_bytes, encode_seconds, ratio, write
                )

    def learn_read(
        self, kind: Kind, num_bytes: int, codec: Codec, seconds: float, lane_seconds: float | None = None
    ) -> None:
        """Take in the CPU seconds that reading a record of `num_bytes` took; `lane_seconds` as `learn_written`."""
        if num_bytes < SMALLEST_PROBED_BYTES:
            return
        if codec == NO_CODEC:
            self._raw_read_seconds = _least(self._raw_read_seconds, seconds / num_bytes)
        elif (figures := self._state_of(kind, num_bytes).figures.get(codec)) is not None:
            figures.decode_seconds_per_byte = _blend_cpu(figures.decode_seconds_per_byte, seconds / num_bytes)
            if lane_seconds is not None:
                decode_seconds = _beyond(seconds / num_bytes, self._raw_read_seconds)
                _, read = self._disk_seconds_per_byte()
                figures.read_wait = self._newer_wait(
                    figures.read_wait, lane_seconds / num_bytes, decode_seconds, figures.ratio, read
                )

    def learn_write_speed(self, bytes_per_second: float, *, is_lower_bound: bool = False) -> None:
        """Take in what the disk wrote of late; a lower bound where it was not asked for all it can do."""
        self._write_bytes_per_second = _newer(self._write_bytes_per_second, bytes_per_second, is_lower_bound)

    def learn_read_speed(self, bytes_per_second: float, *, is_lower_bound: bool = False) -> None:
        """Take in what the disk read of late; a lower bound where it was not asked for all it can do."""
        self._read_bytes_per_second = _newer(self._read_bytes_per_second, bytes_per_second, is_lower_bound)

    def disk_seconds(self, written_bytes: int, read_bytes: int) -> float | None:
        """How long the disk needs for them, unencoded; None where that is not known yet."""
        if self._write_bytes_per_second is None:
            return None
        write_seconds, read_seconds = self._disk_seconds_per_byte()
        return written_bytes * write_seconds + read_bytes * read_seconds

    def _disk_seconds_per_byte(self) -> tuple[float, float]:
        """To write and to read; once a write was seen."""
        write_speed = self._write_bytes_per_second or 1.0
        return 1 / write_speed, 1 / (self._read_bytes_per_second or write_speed)

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
        """Whether to write a record raw after all: where everything is encoded, a disk that was slow stays so.

        Only where it matters: on a disk of twice the speed another choice would be right.
        """
        if state.trial_records_left:
            state.trial_records_left -= 1
            return True
        state.encoded_since_trial += 1
        after = _TRIAL_AFTER_RECORDS[min(state.num_trials, len(_TRIAL_AFTER_RECORDS) - 1)]
        if state.encoded_since_trial < after:
            return False
        write, read = self._disk_seconds_per_byte()
        faster = (write / 2, read / 2)
        if self._cost(state.figures[state.codec], load, faster) < self._cost(None, load, faster):
            return False
        state.num_trials += 1
        state.encoded_since_trial, state.trial_records_left = 0, _TRIAL_RECORDS - 1
        return True

    def _learn(self, state: _ClassState, codec: Codec, ratio: float, encode: float, decode: float | None) -> None:
        figures = state.figures.get(codec)
        if figures is not None:
            figures.learn(ratio, encode, decode)
        else:
            state.figures[codec] = _Figures(ratio, encode, encode if decode is None else decode)

    def _cheapest(self, state: _ClassState, load: Load) -> Codec:
        if self._write_bytes_per_second is None or not state.figures:
            return NO_CODEC
        shrinking = {codec: figures for codec, figures in state.figures.items() if figures.ratio < _WORST_RATIO}
        disk = self._disk_seconds_per_byte()
        costs = {codec: self._cost(figures, load, disk) for codec, figures in _undominated(shrinking).items()}
        costs[NO_CODEC] = self._cost(None, load, disk)
        best = min(costs, key=lambda codec: costs[codec])
        present = state.codec if state.codec in costs else NO_CODEC
        if costs[best] >= _SWITCH_BELOW * costs[present]:
            best = present
        return best if costs[best] < costs[NO_CODEC] else NO_CODEC

    def _cost(self, figures: _Figures | None, load: Load, disk: tuple[float, float]) -> float:
        """Of a byte's way down and up, in seconds of the training.

        Args:
            figures: of the codec; None: unencoded.
            load: lately.
            disk: seconds per byte that it takes to write and to read.
        """
        if figures is None:
            return load.demand * sum(disk)
        encode_seconds = _beyond(figures.encode_seconds_per_byte, self._raw_write_seconds)
        decode_seconds = _beyond(figures.decode_seconds_per_byte, self._raw_read_seconds)
        write, read = (figures.ratio * seconds for seconds in disk)
        moving_seconds = max(write, self._way_seconds(encode_seconds, write, load) + figures.write_wait)
        moving_seconds += max(read, self._way_seconds(decode_seconds, read, load) + figures.read_wait)
        cpu_seconds = encode_seconds + decode_seconds
        wanted_cores = max(1.0, cpu_seconds / moving_seconds)
        price = max(_LEAST_PRICE, 1 - max(0.0, load.free_cores - _SHARED_CORES) / wanted_cores)
        return load.demand * moving_seconds + price * cpu_seconds

    def _way_seconds(self, cpu_seconds: float, disk_seconds: float, load: Load) -> float:
        """Of a byte, while every lane has a record on its way, if none has to wait."""
        cores = min(max(load.free_cores, _LEAST_CORES), self._num_lanes)
        return cpu_seconds / cores + disk_seconds / self._num_lanes

    def _newer_wait(
        self, known: float, lane_seconds: float, cpu_seconds: float, ratio: float, disk_seconds: float
    ) -> float:
        """Of a byte, as are the other seconds; the disk's are those of unencoded ones.

        Where lanes are empty, a record is on its way for less than is accounted for: it did not wait. One that met a
        stall counts no more than the way of unencoded bytes would take; waits that go on grow beyond that.
        """
        if self._write_bytes_per_second is None:
            return known
        waited_seconds = lane_seconds / self._num_lanes
        waited_seconds -= self._way_seconds(cpu_seconds, ratio * disk_seconds, self._load)
        most_seconds = max(self._way_seconds(cpu_seconds, disk_seconds, self._load), _MOST_WAIT_GROWTH * known)
        return _blend(known, min(max(0.0, waited_seconds), most_seconds))

    def _smallest(self, state: _ClassState, kind: Kind) -> Codec:
        tried = {codec: figures.ratio for codec, figures in state.figures.items()}
        if not tried:
            return candidates(kind.itemsize_bytes)[-1]  # tried blind: the encoder stops early if it is in vain
        best = min(tried, key=lambda codec: tried[codec])
        return best if is_shrinking(int(tried[best] * 2**20), 2**20) else NO_CODEC


def _undominated(figures: Mapping[Codec, _Figures]) -> dict[Codec, _Figures]:
    """The codecs that shrink more than every cheaper one.

    Which are cheaper is known beforehand; times do not tell it of what has been tried on a sample alone, which is in
    the cache, beside what has encoded whole records.
    """
    found: dict[Codec, _Figures] = {}
    for codec in sorted(figures, key=_CHEAPEST_FIRST.index):
        if all(figures[codec].ratio < cheaper.ratio - _SAME_RATIO for cheaper in found.values()):
            found[codec] = figures[codec]
    return found


def _beyond(seconds: float, raw_seconds: float | None) -> float:
    return max(0.0, seconds - (raw_seconds or 0.0))


def _least(known: float | None, newest: float) -> float:
    """The least of late: now and then a transfer pays for fresh pages, and an encoded one would have too."""
    return newest if known is None else min(newest, 1.05 * known)


def _newer(known: float | None, newest: float, is_lower_bound: bool) -> float | None:
    if is_lower_bound and (known is None or newest <= known):
        return known
    return newest if known is None else _blend(known, newest)


def _blend_cpu(known: float, newest: float) -> float:
    return _blend(known, min(newest, _MOST_GROWTH * known))


def _blend(known: float, newest: float) -> float:
    return known + _NEWEST_WEIGHT * (newest - known)

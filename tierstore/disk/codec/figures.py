"""Measured figures of codecs and of the drive, and the cost per byte that follows. Pure: no clock, no I/O.

A record costs time in two ways, and how much each counts depends on what else the machine is doing::

    moving   raw      n/W + n/R                  W, R: the disk's bytes per second, all transfers together
             encoded  n·max(r/W, e/p + r/(k·W) + s) + n·max(r/R, d/p + r/(k·R) + t)
                      r: ratio; e, d: CPU seconds per byte to write and to read it, beyond those of an unencoded one;
                      p: cores that are free for it; k: records that are moved at once;
                      s, t: time beyond that for which the k were on their way, per byte of all k
    cost  =  demand · moving  +  price · n·(e + d)

*demand* is how busy the disk would be if nothing were encoded: where training leaves it idle most of the time,
moving is hidden and faster moving gains nothing. *price* is the share of the CPU seconds that is taken from
training: nearly nothing where cores are idle, all of it where training keeps them busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .codec import Codec

__all__ = ["UNKNOWN_LOAD", "CodecFigures", "DriveFigures", "Load", "Sample"]

_LEAST_PRICE = 0.1  # of a CPU second: encoding on idle cores still takes memory bandwidth and power
_LEAST_CORES = 0.5  # that encoding gets if none are free: it waits for its turn
_SHARED_CORES = 0.5  # of the idle ones: a busy training leaves cores idle for moments too short for a job
_NEWEST_WEIGHT = 0.25
_MOST_GROWTH = 1.5  # of a CPU time, by one record: it may have paid for fresh pages
_MOST_WAIT_GROWTH = 2.0  # likewise of a wait: it may have met a stall


class Load(NamedTuple):
    """The machine's load of late, without the store's own encoding.

    Attributes:
        demand: share of the time that the disk would be busy if nothing were encoded, 0 to 1.
        free_cores: how many cores nobody else used.
    """

    demand: float
    free_cores: float


UNKNOWN_LOAD = Load(1.0, 0.0)
"""Every byte and every CPU second counts, so a record is encoded only if that gains on any machine."""


class Sample(NamedTuple):
    """How a codec did on some bytes of a record.

    Attributes:
        codec: the candidate.
        raw_bytes: before.
        encoded_bytes: after.
        encode_seconds, decode_seconds: of one core.
    """

    codec: Codec
    raw_bytes: int
    encoded_bytes: int
    encode_seconds: float
    decode_seconds: float


@dataclass(slots=True)
class CodecFigures:
    """Moving averages of one codec on records that are alike; CPU seconds.

    The waits are the time of records on their way that neither CPU seconds on free cores nor the disk account for: they
    waited for a core behind the store's other threads, or for the interpreter. In seconds per byte, of all lanes
    together.
    """

    ratio: float
    encode_seconds_per_byte: float
    decode_seconds_per_byte: float
    write_wait: float = 0.0
    read_wait: float = 0.0

    def learn(self, ratio: float, encode: float, decode: float | None) -> None:
        """Take in a record, or a sample of one.

        Args:
            ratio: encoded bytes per byte.
            encode, decode: CPU seconds per byte; `decode` None: it was not decoded.
        """
        self.ratio = _blend(self.ratio, ratio)
        self.encode_seconds_per_byte = _blend_cpu(self.encode_seconds_per_byte, encode)
        if decode is not None:
            self.learn_decoding(decode)

    def learn_decoding(self, seconds_per_byte: float) -> None:
        """Take in the CPU seconds per byte of reading a record."""
        self.decode_seconds_per_byte = _blend_cpu(self.decode_seconds_per_byte, seconds_per_byte)

    def forget_waits(self) -> None:
        """Let the waits fade: a codec that is no longer used would never show that its waits are over."""
        self.write_wait, self.read_wait = _blend(self.write_wait, 0.0), _blend(self.read_wait, 0.0)


class DriveFigures:
    """The drive's speed and the CPU time of unencoded records; from them, and a codec's figures, the cost of a byte.

    Args:
        num_lanes: how many records are written, or read, at once.
    """

    def __init__(self, num_lanes: int) -> None:
        self._num_lanes = num_lanes
        self._write_bytes_per_second: float | None = None
        self._read_bytes_per_second: float | None = None
        self._raw_write_seconds: float | None = None  # of CPU, per byte; likewise to read
        self._raw_read_seconds: float | None = None

    @property
    def is_speed_known(self) -> bool:
        """Whether a write was timed."""
        return self._write_bytes_per_second is not None

    def learn_write_speed(self, bytes_per_second: float, *, is_lower_bound: bool) -> None:
        """Take in how fast the disk wrote of late; a lower bound if the disk was not fully used."""
        self._write_bytes_per_second = _newer(self._write_bytes_per_second, bytes_per_second, is_lower_bound)

    def learn_read_speed(self, bytes_per_second: float, *, is_lower_bound: bool) -> None:
        """Take in how fast the disk read of late; a lower bound if the disk was not fully used."""
        self._read_bytes_per_second = _newer(self._read_bytes_per_second, bytes_per_second, is_lower_bound)

    def learn_raw_write(self, seconds_per_byte: float) -> None:
        """Take in the CPU seconds per byte of writing an unencoded record."""
        self._raw_write_seconds = _least(self._raw_write_seconds, seconds_per_byte)

    def learn_raw_read(self, seconds_per_byte: float) -> None:
        """Take in the CPU seconds per byte of reading an unencoded record."""
        self._raw_read_seconds = _least(self._raw_read_seconds, seconds_per_byte)

    def disk_seconds(self, written_bytes: int, read_bytes: int) -> float | None:
        """Seconds that the disk needs for these bytes, unencoded; None: its speed is not known yet."""
        if self._write_bytes_per_second is None:
            return None
        write_seconds, read_seconds = self.seconds_per_byte()
        return written_bytes * write_seconds + read_bytes * read_seconds

    def seconds_per_byte(self) -> tuple[float, float]:
        """The disk's seconds per byte to write and to read. Only after a write was timed."""
        write_speed = self._write_bytes_per_second or 1.0
        return 1 / write_speed, 1 / (self._read_bytes_per_second or write_speed)

    def cost(self, figures: CodecFigures | None, load: Load, disk: tuple[float, float]) -> float:
        """The cost of writing and reading a byte, in seconds of training.

        Args:
            figures: of the codec; None: unencoded.
            load: of late.
            disk: its seconds per byte to write and to read.
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

    def learn_write_wait(
        self, figures: CodecFigures, ratio: float, seconds: float, lane_seconds: float, load: Load
    ) -> None:
        """Take in how long an encoded record was on its way down.

        Args:
            figures: its codec's; their wait changes.
            ratio: the record's own.
            seconds: of CPU, per byte.
            lane_seconds: from the record's first byte to its last, per byte.
            load: when the record was ordered.
        """
        encode_seconds = _beyond(seconds, self._raw_write_seconds)
        write, _ = self.seconds_per_byte()
        figures.write_wait = self._newer_wait(figures.write_wait, lane_seconds, encode_seconds, ratio, write, load)

    def learn_read_wait(self, figures: CodecFigures, seconds: float, lane_seconds: float, load: Load) -> None:
        """Take in how long an encoded record was on its way up; arguments as `learn_write_wait`'s."""
        decode_seconds = _beyond(seconds, self._raw_read_seconds)
        _, read = self.seconds_per_byte()
        figures.read_wait = self._newer_wait(figures.read_wait, lane_seconds, decode_seconds, figures.ratio, read, load)

    def _newer_wait(
        self, known: float, lane_seconds: float, cpu_seconds: float, ratio: float, disk_seconds: float, load: Load
    ) -> float:
        """The average wait with one record taken in. All seconds are per byte; the disk's are for unencoded bytes.

        If lanes are empty, a record takes less time than is accounted for: it did not wait. The wait of one that met a
        stall is limited to the time that unencoded bytes would take; only repeated waits make it grow beyond that.
        """
        if not self.is_speed_known:
            return known
        waited_seconds = lane_seconds / self._num_lanes
        waited_seconds -= self._way_seconds(cpu_seconds, ratio * disk_seconds, load)
        most_seconds = max(self._way_seconds(cpu_seconds, disk_seconds, load), _MOST_WAIT_GROWTH * known)
        return _blend(known, min(max(0.0, waited_seconds), most_seconds))

    def _way_seconds(self, cpu_seconds: float, disk_seconds: float, load: Load) -> float:
        """How long a byte is on its way while every lane has a record, if none has to wait."""
        cores = min(max(load.free_cores, _LEAST_CORES), self._num_lanes)
        return cpu_seconds / cores + disk_seconds / self._num_lanes


def _beyond(seconds: float, raw_seconds: float | None) -> float:
    return max(0.0, seconds - (raw_seconds or 0.0))


def _least(known: float | None, newest: float) -> float:
    """The least of late, because a transfer that paid for fresh pages would have paid for them encoded too."""
    return newest if known is None else min(newest, 1.05 * known)


def _newer(known: float | None, newest: float, is_lower_bound: bool) -> float | None:
    if is_lower_bound and (known is None or newest <= known):
        return known
    return newest if known is None else _blend(known, newest)


def _blend_cpu(known: float, newest: float) -> float:
    return _blend(known, min(newest, _MOST_GROWTH * known))


def _blend(known: float, newest: float) -> float:
    return known + _NEWEST_WEIGHT * (newest - known)

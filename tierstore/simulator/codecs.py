"""Chooses the codec of a simulated record, and its size and times. Under "auto", `CodecChooser` decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ..disk.codec.choice import UNKNOWN_LOAD, CodecChooser, Load, Sample, candidates
from ..disk.codec.codec import NO_CODEC, Codec, parse_codec
from ..disk.tier import Kind
from .clock import Clock
from .hardware import Activity, CodecSpeed, Hardware
from .record import SimulatedRecord

_METER_EVERY_SECONDS = 0.1


class Encoded(NamedTuple):
    """A record as it is stored: its size on disk before rounding up to blocks, and the seconds of one core.

    `ordered`: the codec that was chosen, even if there are no figures of it and nothing is encoded.
    """

    codec: str
    stored_bytes: int
    encode_seconds: float
    ordered: Codec


class CodecOfRecords:
    """The codec of each record of one rank. A codec without figures stores bytes as they are.

    `training_cores`: that training keeps busy while it computes. `num_at_once`: how many records are encoded at a time.
    Raises ConfigError: there is no such codec.
    """

    def __init__(self, codec: str, hardware: Hardware, training_cores: float, num_at_once: int, clock: Clock) -> None:
        self._fixed = parse_codec(codec)
        self._speeds = {(speed.kind, speed.codec): speed for speed in hardware.codecs}
        self._chooser = CodecChooser(num_lanes=num_at_once)
        self._load = UNKNOWN_LOAD
        self._cores, self._training_cores = hardware.cores, training_cores
        self._clock = clock
        self._looked_at = clock.now_seconds
        self._busy_before: Mapping[Activity, float] = {}
        self._moved = Counter[str]()  # bytes since the load was last measured; "raw": before encoding

    def choose(self, record: SimulatedRecord, *, is_space_short: bool) -> Encoded:
        codec, kind = self._fixed, Kind(dtype=record.kind)
        if codec is None:
            self._look_at_machine()
            choice = self._chooser.choose(kind, record.nbytes, self._load, is_space_short=is_space_short)
            codec = choice.codec
            if choice.probe:
                self._chooser.learn_samples(kind, record.nbytes, self._samples(record))
        speed = self._speed_of(record.kind, str(codec))
        if speed is None:
            return Encoded(str(NO_CODEC), record.nbytes, 0.0, codec)
        encode_seconds = record.nbytes / speed.encode_bytes_per_second
        return Encoded(str(codec), int(record.nbytes * speed.ratio), encode_seconds, codec)

    def learn_written(self, record: SimulatedRecord, encoded: Encoded) -> None:
        self._moved.update({"written": encoded.stored_bytes, "raw written": record.nbytes})
        if self._fixed is None:
            kind = Kind(dtype=record.kind)
            self._chooser.learn_written(kind, record.nbytes, encoded.ordered, encoded.stored_bytes)

    def learn_read(self, record: SimulatedRecord, read_bytes: int) -> None:
        self._moved.update({"read": read_bytes, "raw read": record.nbytes})

    def decode_seconds(self, record: SimulatedRecord) -> float:
        speed = self._speed_of(record.kind, record.codec)
        return 0.0 if speed is None else record.nbytes / speed.decode_bytes_per_second

    def _look_at_machine(self) -> None:
        seconds = self._clock.now_seconds - self._looked_at
        if seconds < _METER_EVERY_SECONDS:
            return
        busy = {activity: self._clock.busy_seconds.get(activity, 0.0) for activity in Activity}
        since = {activity: busy[activity] - self._busy_before.get(activity, 0.0) for activity in Activity}
        moved, self._moved = self._moved, Counter()
        if moved["written"] and since[Activity.WRITE]:
            self._chooser.learn_speed("write", moved["written"] / since[Activity.WRITE])
        if moved["read"] and since[Activity.READ]:
            self._chooser.learn_speed("read", moved["read"] / since[Activity.READ])
        demand = (self._chooser.disk_seconds(moved["raw written"], moved["raw read"]) or seconds) / seconds
        free_cores = self._cores - self._training_cores * since[Activity.COMPUTE] / seconds
        self._load = Load(min(1.0, demand), max(0.0, free_cores))
        self._looked_at, self._busy_before = self._clock.now_seconds, busy

    def _samples(self, record: SimulatedRecord) -> list[Sample]:
        samples = []
        for codec in (*candidates(1), *candidates(2)):
            speed = self._speed_of(record.kind, str(codec))
            if speed is not None:
                encode_seconds = record.nbytes / speed.encode_bytes_per_second
                decode_seconds = record.nbytes / speed.decode_bytes_per_second
                encoded_bytes = int(record.nbytes * speed.ratio)
                samples.append(Sample(codec, record.nbytes, encoded_bytes, encode_seconds, decode_seconds))
        return samples

    def _speed_of(self, kind: str, codec: str) -> CodecSpeed | None:
        return self._speeds.get((kind, codec)) or self._speeds.get(("", codec))

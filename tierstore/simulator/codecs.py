"""Chooses the codec of a simulated record, and its size and times. Under "auto", `CodecChooser` decides."""

from __future__ import annotations

from typing import NamedTuple

from ..disk.codec.choice import CodecChooser, Load, Sample, candidates
from ..disk.codec.codec import NO_CODEC, Codec, parse_codec
from ..disk.tier import Kind
from ..hardware import CodecSpeed
from .hardware import Hardware
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

    The chooser knows speeds and cores from the beginning, and takes the drive to be busy: a step that hardly uses it
    hardly depends on the codec. `free_cores`: that training leaves idle. `num_at_once`: how many records are encoded at
    a time. Raises ConfigError: there is no such codec.
    """

    def __init__(self, codec: str, hardware: Hardware, free_cores: float, num_at_once: int) -> None:
        self._fixed = parse_codec(codec)
        self._speeds = hardware.codecs
        self._load = Load(1.0, free_cores)
        self._chooser = CodecChooser(num_lanes=num_at_once)
        self._chooser.learn_speed("write", max(hardware.drive.writes.values()))
        self._chooser.learn_speed("read", max(hardware.drive.reads.values()))

    def choose(self, record: SimulatedRecord, *, is_space_short: bool) -> Encoded:
        codec, kind = self._fixed, Kind(dtype=record.kind)
        if codec is None:
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
        if self._fixed is None:
            kind = Kind(dtype=record.kind)
            self._chooser.learn_written(kind, record.nbytes, encoded.ordered, encoded.stored_bytes)

    def decode_seconds(self, record: SimulatedRecord) -> float:
        speed = self._speed_of(record.kind, record.codec)
        return 0.0 if speed is None else record.nbytes / speed.decode_bytes_per_second

    def _samples(self, record: SimulatedRecord) -> list[Sample]:
        """Of every codec that "auto" may try."""
        nbytes = record.nbytes
        codecs = dict.fromkeys((*candidates(1), *candidates(2)))
        found = [(codec, self._speed_of(record.kind, str(codec))) for codec in codecs]
        return [
            Sample(
                codec,
                nbytes,
                int(nbytes * speed.ratio),
                nbytes / speed.encode_bytes_per_second,
                nbytes / speed.decode_bytes_per_second,
            )
            for codec, speed in found
            if speed is not None
        ]

    def _speed_of(self, kind: str, codec: str) -> CodecSpeed | None:
        return self._speeds.get((kind, codec)) or self._speeds.get(("", codec))

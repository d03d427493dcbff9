"""Chooses the codec of a simulated record, and its size and times. Under "auto", `CodecChooser` decides."""

from __future__ import annotations

from typing import NamedTuple

from ..disk.codec.choice import CodecChooser, Load, Sample, candidates
from ..disk.codec.codec import NO_CODEC, parse_codec
from ..disk.tier import Kind
from .hardware import CodecSpeed, Hardware
from .record import SimulatedRecord


class Encoded(NamedTuple):
    """A record as it is stored: its size on disk before rounding up to blocks, and the seconds of one core."""

    codec: str
    stored_bytes: int
    encode_seconds: float


class CodecOfRecords:
    """The codec of each record of one rank. A codec without figures stores bytes as they are.

    The chooser knows speeds and cores from the beginning, and takes the drive to be busy: a step that hardly uses it
    hardly depends on the codec. `free_cores`: that training leaves idle. `num_at_once`: how many records are encoded at
    a time. Raises ConfigError: there is no such codec."""

    def __init__(self, codec: str, hardware: Hardware, free_cores: float, num_at_once: int) -> None:
        self._fixed = parse_codec(codec)
        self._speeds = hardware.codecs
        self._load = Load(1.0, free_cores)
        self._chooser = CodecChooser(num_lanes=num_at_once)
        self._chooser.learn_speed("write", max(hardware.drive.writes.values()))
        self._chooser.learn_speed("read", max(hardware.drive.reads.values()))

    def choose(self, record: SimulatedRecord, *, is_space_short: bool) -> Encoded:
        codec, kind, nbytes = self._fixed, Kind(dtype=record.kind), record.nbytes
        if codec is None:
            choice = self._chooser.choose(kind, nbytes, self._load, is_space_short=is_space_short)
            codec = choice.codec
            if choice.probe:
                self._chooser.learn_samples(kind, nbytes, self._samples(record))
        speed = self._speed_of(record.kind, str(codec))
        if speed is None:
            return Encoded(str(NO_CODEC), nbytes, 0.0)
        return Encoded(str(codec), int(nbytes * speed.ratio), nbytes / speed.encode_bytes_per_second)

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

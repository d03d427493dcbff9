"""The engine and the disk tier of one rank, in virtual time: lanes, turns, codecs, and how long each job takes.

Jobs do the same as those of `disk/records.py`. A write computes its checksum, waits for a turn at the device, encodes
and writes. A read waits for a turn, reads, decodes, gives the turn back, and computes its checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from ..disk.tier import Loaded, Stored
from ..errors import StoreFullError
from .clock import Clock, Process, VirtualTurns, Wait
from .codecs import CodecOfRecords
from .hardware import Activity, Hardware
from .record import SimulatedRecord

__all__ = ["SimulatedEngine", "SimulatedTransfers"]

_DEMAND, _PREFETCH = 0, 1
_BLOCK_BYTES = 4096


class SimulatedTransfers(Protocol):
    """The rank's records, as the simulated engine sees them. See `tierstore.residency.transfers.Transfers`."""

    def begin_spill(self, record: SimulatedRecord) -> bool:
        """A write is about to begin. Returns whether the record is still to be written."""

    def end_spill(self, record: SimulatedRecord, outcome: Stored | StoreFullError) -> None:
        """The write has ended."""

    def begin_restore(self, record: SimulatedRecord) -> bool:
        """A read is about to begin. Returns whether the record is still to be read."""

    def end_restore(self, record: SimulatedRecord, outcome: Loaded) -> None:
        """The read has ended."""

    def end_discard(self, num_records: int) -> None:
        """The disk space of `num_records` records has been freed."""


class _Lanes:
    """Runs `num_lanes` jobs at once. The most urgent waiting record comes next."""

    def __init__(self, clock: Clock, num_lanes: int, job: Callable[[SimulatedRecord], Process]) -> None:
        self._clock = clock
        self._num_idle = num_lanes
        self._job = job
        self._queue: list[tuple[int, int, SimulatedRecord]] = []
        self._numbers = count()

    def submit(self, record: SimulatedRecord, urgency: int) -> None:
        heappush(self._queue, (urgency, next(self._numbers), record))
        self._clock.call_soon(self._begin_next)

    def _begin_next(self) -> None:
        if self._queue and self._num_idle:
            self._num_idle -= 1
            self._clock.begin(self._lane())

    def _lane(self) -> Process:
        while self._queue:
            yield from self._job(heappop(self._queue)[2])
        self._num_idle += 1


class SimulatedEngine:
    """Moves the bytes of one rank.

    Args:
        clock, hardware: shared by all ranks.
        device: turns at the drive, shared by all ranks.
        codecs: chooses the codec of each record.
        disk_bytes: the rank's budget on disk.
        num_spill_lanes, num_restore_lanes: how many records are in flight each way.
        num_turns: how many of them, each way, are encoded or at the drive.

    Attributes:
        transfers: is told of each transfer; set before anything is submitted.
    """

    def __init__(
        self,
        clock: Clock,
        hardware: Hardware,
        device: VirtualTurns,
        codecs: CodecOfRecords,
        *,
        disk_bytes: int,
        num_spill_lanes: int,
        num_restore_lanes: int,
        num_turns: int,
    ) -> None:
        self.transfers: SimulatedTransfers
        self._clock = clock
        self._hardware = hardware
        self._device = device
        self._codecs = codecs
        self._disk_bytes = disk_bytes
        self._stored: dict[int, int] = {}  # bytes taken on disk, by the record's key
        self._taken_bytes = 0
        self._writes, self._reads = VirtualTurns(num_turns), VirtualTurns(num_turns)
        self._spills = _Lanes(clock, num_spill_lanes, self._spill)
        self._restores = _Lanes(clock, num_restore_lanes, self._restore)
        self._discards: list[int] = []

    def submit_spill(self, record: SimulatedRecord) -> None:
        self._spills.submit(record, _PREFETCH)

    def submit_restore(self, record: SimulatedRecord, *, demanded: bool) -> None:
        self._restores.submit(record, _DEMAND if demanded else _PREFETCH)

    def submit_discard(self, key: int) -> None:
        """See `Engine`. A discard takes no time, but is done after the actions that are already due."""
        self._discards.append(key)
        if len(self._discards) == 1:
            self._clock.call_soon(self._discard)

    def _discard(self) -> None:
        keys, self._discards = self._discards, []
        for key in keys:
            self._taken_bytes -= self._stored.pop(key)
        self.transfers.end_discard(len(keys))

    def _spill(self, record: SimulatedRecord) -> Process:
        if not self.transfers.begin_spill(record):
            return
        if record.ready is not None:
            yield record.ready.wait
        room_bytes = self._disk_bytes - self._taken_bytes
        encoded = self._codecs.choose(record, is_space_short=room_bytes - record.nbytes < self._disk_bytes // 8)
        stored_bytes = -(-encoded.stored_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        if stored_bytes > room_bytes:
            full = StoreFullError(record.nbytes, self._taken_bytes, self._disk_bytes)
            self.transfers.end_spill(record, full)
            return
        self._stored[record.key] = stored_bytes
        self._taken_bytes += stored_bytes
        yield self._clock.work(Activity.CPU, self._raw_cpu_seconds(record))
        yield self._writes.take
        yield self._clock.work(Activity.CPU, encoded.encode_seconds)
        drive_seconds = yield from self._transfer(
            Activity.WRITE, self._hardware.drive.write_latency_seconds, stored_bytes
        )
        self._writes.give_back()
        record.codec = encoded.codec
        cpu_seconds = self._raw_cpu_seconds(record) + encoded.encode_seconds
        self._codecs.learn_written(record, encoded)
        self.transfers.end_spill(
            record, Stored(stored_bytes, encoded.codec, record.kind, None, drive_seconds, cpu_seconds)
        )

    def _restore(self, record: SimulatedRecord) -> Process:
        if not self.transfers.begin_restore(record):
            return
        stored_bytes = record.stored_bytes
        yield self._reads.take
        drive_seconds = yield from self._transfer(
            Activity.READ, self._hardware.drive.read_latency_seconds, stored_bytes
        )
        decode_seconds = self._codecs.decode_seconds(record)
        yield self._clock.work(Activity.CPU, decode_seconds)
        self._reads.give_back()
        self._codecs.learn_read(record, stored_bytes)
        yield self._clock.work(Activity.CPU, self._raw_cpu_seconds(record))
        cpu_seconds = self._raw_cpu_seconds(record) + decode_seconds
        self.transfers.end_restore(record, Loaded(stored_bytes, drive_seconds, cpu_seconds))

    def _transfer(self, direction: Activity, latency_seconds: float, num_bytes: int) -> Generator[Wait, None, float]:
        """Move bytes. Returns the seconds at the drive, including waiting for a turn there."""
        began_seconds = self._clock.now_seconds
        yield self._device.take
        yield self._clock.sleep(latency_seconds)
        yield self._clock.work(direction, num_bytes)
        self._device.give_back()
        return self._clock.now_seconds - began_seconds

    def _raw_cpu_seconds(self, record: SimulatedRecord) -> float:
        return self._hardware.cpu_seconds_per_record + record.nbytes * self._hardware.cpu_seconds_per_byte

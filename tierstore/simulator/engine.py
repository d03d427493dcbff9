"""The engine and the disk tier of one rank, in virtual time: lanes, turns, codecs, and how long each job takes.

Jobs do the same as those of `disk/records.py`. A write computes its checksum, waits for a turn at the device, encodes
and writes. A read waits for a turn, reads, decodes, gives the turn back, and computes its checksum.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from ..base.defaults import NUM_BESIDE_DEVICE
from ..disk.tier import Loaded, Stored
from ..errors import StoreFullError
from .clock import Clock, Process, VirtualTurns
from .codecs import CodecOfRecords
from .hardware import Activity, Hardware
from .record import SimulatedRecord

if TYPE_CHECKING:
    from .rank import Rank
    from .simulate import Settings

_DEMAND, _PREFETCH = 0, 1
_BLOCK_BYTES = 4096


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
        if self._num_idle and self._queue:
            self._num_idle -= 1
            self._clock.begin(self._lane())

    def _lane(self) -> Process:
        while self._queue:
            yield from self._job(heappop(self._queue)[2])
        self._num_idle += 1


class SimulatedEngine:
    """Moves the bytes of one rank. Clock and hardware are shared by all ranks.

    `transfers`: the rank, which is told of each transfer; set before anything is submitted.
    """

    def __init__(self, clock: Clock, hardware: Hardware, free_cores: float, settings: Settings) -> None:
        self.transfers: Rank
        self._clock = clock
        self._hardware = hardware
        self._codecs = CodecOfRecords(settings.codec, hardware, free_cores, settings.io_depth)
        self._disk_bytes = settings.disk_bytes or 0
        self._stored: dict[int, int] = {}  # bytes taken on disk, by the record's key
        self._taken_bytes = 0
        self._writes, self._reads = VirtualTurns(settings.io_depth), VirtualTurns(settings.io_depth)
        num_lanes = settings.io_depth + NUM_BESIDE_DEVICE
        self._spills, self._restores = _Lanes(clock, num_lanes, self._spill), _Lanes(clock, num_lanes, self._restore)
        self._discards: list[int] = []

    def submit_spill(self, record: SimulatedRecord) -> None:
        self._spills.submit(record, _PREFETCH)

    def submit_restore(self, record: SimulatedRecord, *, demanded: bool) -> None:
        self._restores.submit(record, _DEMAND if demanded else _PREFETCH)

    def submit_discard(self, key: int) -> None:
        """A discard takes no time, but is done after the actions that are already due."""
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
        room_bytes = self._disk_bytes - self._taken_bytes
        encoded = self._codecs.choose(record, is_space_short=room_bytes - record.nbytes < self._disk_bytes // 8)
        stored_bytes = -(-encoded.stored_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        if stored_bytes > room_bytes:
            self.transfers.end_spill(record, StoreFullError(record.nbytes, self._taken_bytes, self._disk_bytes))
            return
        self._stored[record.key] = stored_bytes
        self._taken_bytes += stored_bytes
        yield self._clock.work(Activity.CPU, self._raw_cpu_seconds(record))
        yield self._writes.take
        yield self._clock.work(Activity.CPU, encoded.encode_seconds)
        yield self._clock.sleep(self._hardware.drive.write_latency_seconds)
        yield self._clock.work(Activity.WRITE, stored_bytes)
        self._writes.give_back()
        record.codec = encoded.codec
        self.transfers.end_spill(record, Stored(stored_bytes, encoded.codec))

    def _restore(self, record: SimulatedRecord) -> Process:
        if not self.transfers.begin_restore(record):
            return
        stored_bytes = record.stored_bytes
        yield self._reads.take
        yield self._clock.sleep(self._hardware.drive.read_latency_seconds)
        yield self._clock.work(Activity.READ, stored_bytes)
        yield self._clock.work(Activity.CPU, self._codecs.decode_seconds(record))
        self._reads.give_back()
        yield self._clock.work(Activity.CPU, self._raw_cpu_seconds(record))
        self.transfers.end_restore(record, Loaded(stored_bytes))

    def _raw_cpu_seconds(self, record: SimulatedRecord) -> float:
        return self._hardware.cpu_seconds_per_record + record.nbytes * self._hardware.cpu_seconds_per_byte

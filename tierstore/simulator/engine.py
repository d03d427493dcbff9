"""The engine and the disk tier of one rank, in virtual time: lanes, turns, codecs, and how long each job takes.

Jobs do the same as those of `disk/records.py`. A write computes its checksum, waits for a turn at the device, encodes
and writes. A read waits for a turn, reads, decodes, gives the turn back, and computes its checksum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..base.defaults import NUM_BESIDE_DEVICE
from ..disk.tier import Loaded, Stored
from ..errors import StoreFullError
from ..ledger.jobs import Discard, Job, Read, Room, Write
from .clock import Clock, Process, VirtualTurns
from .codecs import CodecOfRecords
from .hardware import Activity, Hardware
from .record import SimulatedRecord

if TYPE_CHECKING:
    from .rank import Rank
    from .simulate import Settings

_BLOCK_BYTES = 4096


class SimulatedEngine:
    """Moves the bytes of one rank, as `store/worker.py` does. Clock and hardware are shared by all ranks.

    `rank`: whose bytes; set before it is woken."""

    def __init__(self, clock: Clock, hardware: Hardware, free_cores: float, settings: Settings) -> None:
        self.rank: Rank
        self._clock = clock
        self._hardware = hardware
        self._codecs = CodecOfRecords(settings.codec, hardware, free_cores, settings.io_depth)
        self._disk_bytes = settings.disk_bytes or 0
        self._stored: dict[int, int] = {}  # bytes taken on disk, by the record's key
        self._taken_bytes = 0
        self._writes, self._reads = VirtualTurns(settings.io_depth), VirtualTurns(settings.io_depth)
        self._free_writes = self._free_reads = settings.io_depth + NUM_BESIDE_DEVICE
        self._ended: list[tuple[Job[SimulatedRecord], Any]] = []
        self._is_turn_due = False

    def wake(self) -> None:
        """A turn is taken after the actions that are already due."""
        if not self._is_turn_due:
            self._is_turn_due = True
            self._clock.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._is_turn_due = False
        ended, self._ended = self._ended, []
        for job in self.rank.exchange(ended, Room(self._free_writes, self._free_reads, 1)):
            match job:
                case Write(record, _):
                    self._free_writes -= 1
                    self._clock.begin(self._spill(record))
                case Read(record, _):
                    self._free_reads -= 1
                    self._clock.begin(self._restore(record))
                case Discard(keys):
                    self._taken_bytes -= sum(map(self._stored.pop, keys))  # takes no time
                    self._end(job, None)

    def _end(self, job: Job[SimulatedRecord], outcome: object) -> None:
        self._ended.append((job, outcome))
        self.wake()

    def _spill(self, record: SimulatedRecord) -> Process:
        room_bytes = self._disk_bytes - self._taken_bytes
        encoded = self._codecs.choose(record, is_space_short=room_bytes - record.nbytes < self._disk_bytes // 8)
        stored_bytes = -(-encoded.stored_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        outcome: Stored | StoreFullError = StoreFullError(record.nbytes, self._taken_bytes, self._disk_bytes)
        if stored_bytes <= room_bytes:
            outcome = Stored(stored_bytes, encoded.codec)
            self._stored[record.key] = stored_bytes
            self._taken_bytes += stored_bytes
            yield self._clock.work(Activity.CPU, self._raw_cpu_seconds(record))
            yield self._writes.take
            yield self._clock.work(Activity.CPU, encoded.encode_seconds)
            yield self._clock.sleep(self._hardware.drive.write_latency_seconds)
            yield self._clock.work(Activity.WRITE, stored_bytes)
            self._writes.give_back()
            record.codec = encoded.codec
        self._free_writes += 1
        self._end(Write(record), outcome)

    def _restore(self, record: SimulatedRecord) -> Process:
        stored_bytes = record.stored_bytes
        yield self._reads.take
        yield self._clock.sleep(self._hardware.drive.read_latency_seconds)
        yield self._clock.work(Activity.READ, stored_bytes)
        yield self._clock.work(Activity.CPU, self._codecs.decode_seconds(record))
        self._reads.give_back()
        yield self._clock.work(Activity.CPU, self._raw_cpu_seconds(record))
        self._free_reads += 1
        self._end(Read(record), Loaded(stored_bytes))

    def _raw_cpu_seconds(self, record: SimulatedRecord) -> float:
        return self._hardware.cpu_seconds_per_record + record.nbytes * self._hardware.cpu_seconds_per_byte

"""Applies the `codec` option: gives the order for each record, and learns from how its write and reads went."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping

from ...base.config import available_cores
from ..location import Written
from ..tier import Kind, Loaded
from .choice import SMALLEST_PROBED_BYTES, UNKNOWN_LOAD, CodecChooser, WriteOrder
from .codec import NO_CODEC, Codec
from .load import LoadMeter, TransferClock, read_machine
from .probing import content_of

OTHER_KINDS = "others"
"""The name under which kinds are counted that have no entry of their own."""

_MOST_KINDS = 1024
_LONGEST_NAME = 128  # of a dtype and an origin; those that PyTorch gives have some 50 letters
_METER_EVERY_SECONDS = 0.1
_SURE_AFTER = 16
"""After so many records in a row of one kind and size class that stay as they are, only one in so many is asked for."""


class CodecPolicy:
    """A fixed codec (None: "auto"), or the choice of one per kind of record. Lives on one loop; never blocks. `clock`
    times each transfer of unencoded bytes."""

    def __init__(self, fixed: Codec | None, num_at_once: int) -> None:
        self._fixed = fixed
        self._chooser = CodecChooser(num_lanes=num_at_once)
        self.clock = TransferClock()
        self._meter = LoadMeter(available_cores(), read_machine())
        self._metered_at = time.perf_counter()
        self._load = UNKNOWN_LOAD
        self._cpu_seconds = 0.0  # of jobs that the meter was not told of
        self._written_bytes = self._read_bytes = 0  # likewise, unencoded
        self._raw_in_a_row: dict[tuple[Kind, int], int] = {}
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def stays_raw(self, kind: Kind, num_bytes: int) -> bool:
        """Whether the record is stored as it is, like those before it of its kind and size, without asking `order`.

        Unless the space is short. `kind`: before `kind_of`."""
        alike = kind, num_bytes.bit_length()
        number = self._raw_in_a_row.get(alike, 0)
        if number < _SURE_AFTER:
            return False
        self._raw_in_a_row[alike] = number + 1
        return number % _SURE_AFTER > 0

    def kind_of(self, kind: Kind, source: memoryview) -> Kind:
        """The record's kind; with the result of a look at its bytes, if the codec may depend on it."""
        if self._fixed is not None or len(source) < SMALLEST_PROBED_BYTES:
            return kind
        return kind._replace(content=content_of(source, kind))

    def order(self, kind: Kind, num_bytes: int, seed: int | None, *, is_space_short: bool) -> WriteOrder:
        if self._fixed is not None:
            return WriteOrder(self._fixed, max(1, kind.itemsize_bytes), seed)
        while self.clock.new_speeds:
            self._chooser.learn_speed(*self.clock.new_speeds.popleft())
        now = time.perf_counter()
        if now - self._metered_at >= _METER_EVERY_SECONDS:
            self._metered_at = now
            if self._written_bytes or self._read_bytes:
                disk_seconds = self._chooser.disk_seconds(self._written_bytes, self._read_bytes)
                self._meter.count(self._cpu_seconds, disk_seconds)
                self._cpu_seconds, self._written_bytes, self._read_bytes = 0.0, 0, 0
            self._load = self._meter.update(read_machine())
        alike = kind._replace(content=""), num_bytes.bit_length()
        in_a_row = self._raw_in_a_row.get(alike, 0)
        num_alike = _SURE_AFTER if in_a_row >= _SURE_AFTER else 1
        order = self._chooser.choose(kind, num_bytes, self._load, is_space_short=is_space_short, num_alike=num_alike)
        if order.codec != NO_CODEC:
            self._raw_in_a_row.pop(alike, None)
        elif in_a_row < _SURE_AFTER and len(self._raw_in_a_row) < _MOST_KINDS:
            self._raw_in_a_row[alike] = in_a_row + 1
        return order._replace(seed=seed)

    def learn_written(self, kind: Kind, num_bytes: int, order: WriteOrder, written: Written, codec: str) -> str:
        """Take in how a write went; returns the kind's name in `choices`. `codec`: the words for `written.codec`."""
        self._cpu_seconds += written.cpu_seconds
        self._written_bytes += num_bytes
        if written.samples:
            self._chooser.learn_samples(kind, num_bytes, written.samples)
        if self._fixed is None and order.codec != NO_CODEC:
            self._chooser.learn_written(kind, num_bytes, order.codec, written.encoded_bytes, written.lane_seconds)
        name = f"{kind.dtype} {kind.origin}".strip()[:_LONGEST_NAME] or "unknown"
        if kind.content:
            name += f", {kind.content}"
        if name not in self._counts and len(self._counts) >= _MOST_KINDS:
            name = OTHER_KINDS
        self._counts[name][codec] += 1
        return name

    def learn_read(self, num_bytes: int, loaded: Loaded) -> None:
        self._cpu_seconds += loaded.cpu_seconds or 0.0
        self._read_bytes += num_bytes

    def choices(self) -> Mapping[str, Mapping[str, int]]:
        """How many records were stored with each codec, by kind; any thread."""
        return {kind: dict(counts) for kind, counts in list(self._counts.items())}

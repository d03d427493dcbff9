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
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def kind_of(self, kind: Kind, source: memoryview) -> Kind:
        """The record's kind; with the result of a look at its bytes, if the codec may depend on it."""
        if self._fixed is not None or len(source) < SMALLEST_PROBED_BYTES:
            return kind
        return kind._replace(content=content_of(source, kind))

    def order(self, kind: Kind, num_bytes: int, seed: int | None, *, is_space_short: bool) -> WriteOrder:
        if self._fixed is not None:
            return WriteOrder(self._fixed, max(1, kind.itemsize_bytes), seed)
        now = time.perf_counter()
        if now - self._metered_at >= _METER_EVERY_SECONDS:
            self._metered_at = now
            self._load = self._meter.update(read_machine())
        order = self._chooser.choose(kind, num_bytes, self._load, is_space_short=is_space_short)
        return order._replace(seed=seed)

    def learn_written(self, kind: Kind, num_bytes: int, order: WriteOrder, written: Written) -> str:
        """Take in how a write went; returns the kind's name in `choices`."""
        self._learn_job(written.cpu_seconds, num_bytes, 0)
        if written.samples:
            self._chooser.learn_samples(kind, num_bytes, written.samples)
        if self._fixed is None and order.codec != NO_CODEC:
            self._chooser.learn_written(kind, num_bytes, order.codec, written.encoded_bytes, written.lane_seconds)
        name = f"{kind.dtype} {kind.origin}".strip()[:_LONGEST_NAME] or "unknown"
        if kind.content:
            name += f", {kind.content}"
        if name not in self._counts and len(self._counts) >= _MOST_KINDS:
            name = OTHER_KINDS
        self._counts[name][str(written.codec)] += 1
        return name

    def learn_read(self, num_bytes: int, loaded: Loaded) -> None:
        self._learn_job(loaded.cpu_seconds or 0.0, 0, num_bytes)

    def choices(self) -> Mapping[str, Mapping[str, int]]:
        """How many records were stored with each codec, by kind; any thread."""
        return {kind: dict(counts) for kind, counts in list(self._counts.items())}

    def _learn_job(self, cpu_seconds: float, written_bytes: int, read_bytes: int) -> None:
        while self.clock.new_speeds:
            self._chooser.learn_speed(*self.clock.new_speeds.popleft())
        self._meter.count(cpu_seconds, self._chooser.disk_seconds(written_bytes, read_bytes))

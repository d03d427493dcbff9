"""The `codec` option at work: what to order for a record, and what was learned from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..codec import NO_CODEC, Codec
from ..codec_choice import Choice, CodecChooser
from .location import Location
from .records import ReadReport, WriteOrder, Written
from .tier import Kind

__all__ = ["CodecPolicy"]

_MOST_KINDS = 1024


class CodecPolicy:
    """A fixed codec, or the choice of one per kind of record. Lives on one loop; never blocks."""

    def __init__(self, fixed: Codec | None, num_at_once: Callable[[], int]) -> None:
        """`fixed`: None means "auto". `num_at_once`: how many jobs share the disk now."""
        self._fixed = fixed
        self._num_at_once = num_at_once
        self._chooser = CodecChooser()
        self._kinds: dict[int, Kind] = {}  # of live encoded records, for what decoding them teaches
        self._counts: dict[str, dict[str, int]] = {}

    def order(self, kind: Kind, num_bytes: int, seed: int | None, *, is_space_short: bool) -> WriteOrder:
        """What to make of the next record; `seed` is its checksum's."""
        choice = Choice(self._fixed or NO_CODEC, probe=False)
        if self._fixed is None:
            choice = self._chooser.choose(kind, num_bytes, is_space_short=is_space_short)
        return WriteOrder(choice.codec, max(1, kind.itemsize_bytes), seed, choice.probe)

    def learn_written(self, key: int, kind: Kind, num_bytes: int, order: WriteOrder, written: Written) -> None:
        """Take in how a write went."""
        self._count(kind, str(written.codec))
        if self._fixed is not None:
            return
        self._chooser.learn_samples(kind, num_bytes, written.samples)
        self._chooser.learn_written(kind, num_bytes, order.codec, written.encoded_bytes, written.encode_seconds)
        self._chooser.learn_write_speed(written.encoded_bytes, written.write_seconds, self._num_at_once())
        if written.codec != NO_CODEC:
            self._kinds[key] = kind

    def learn_read(self, key: int, location: Location, report: ReadReport) -> None:
        """Take in how a read went."""
        if self._fixed is not None:
            return
        self._chooser.learn_read_speed(location.encoded_bytes, report.read_seconds, self._num_at_once())
        if (kind := self._kinds.get(key)) is not None:
            codec = Codec(location.codec, location.level)
            self._chooser.learn_decoded(kind, location.logical_bytes, codec, report.decode_seconds)

    def forget(self, key: int) -> None:
        """The record is gone."""
        self._kinds.pop(key, None)

    def choices(self) -> Mapping[str, Mapping[str, int]]:
        """How many records were stored with each codec, by kind; any thread."""
        return {kind: dict(counts) for kind, counts in list(self._counts.items())}

    def _count(self, kind: Kind, codec: str) -> None:
        name = f"{kind.dtype} {kind.origin}".strip() or "unknown"
        if name not in self._counts and len(self._counts) >= _MOST_KINDS:
            name = "others"
        counts = self._counts.setdefault(name, {})
        counts[codec] = counts.get(codec, 0) + 1

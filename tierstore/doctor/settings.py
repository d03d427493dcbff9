"""Makes recommended settings, with reasons, from measurements. Pure.

If no value is better than the default, the advice is to leave it out: a figure without a reason would become outdated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct

from ..base.config import format_bytes, parse_size
from ..disk.codec.choice import CodecChooser
from ..disk.codec.codec import BITS, CONSTANT, NO_CODEC, Codec, parse_codec
from ..disk.codec.figures import Load, Sample
from .drive_findings import are_cores_shared, is_drive_shared, unfit_because
from .measurements import Measurements, fastest
from .samples import SAMPLE_KINDS

__all__ = ["Setting", "codec_outlook", "settings_of"]

MIB, GIB = 2**20, 2**30

_HOST_SHARE = 4  # a quarter, as by default: training needs the rest for itself
_HOST_SHARE_BESIDE_ACCELERATORS = 2  # a half: parameters and gradients are on accelerators
_ROUND_BYTES = 64 * MIB
_USUAL_STAGING_BYTES = 112 * MIB
_LEAST_STAGING_BYTES = 16 * MIB
_STAGING_SHARE = 16
_LEAST_MIN_BYTES, _MOST_MIN_BYTES = MIB, 16 * MIB
_RECORD_BYTES = 16 * MIB
_SAMPLE_BYTES = 2**20
_CODECS_OF_AUTO = {str(codec): codec for codec in (BITS, CONSTANT)}


class Setting(Struct, frozen=True, kw_only=True):
    """One argument of `TierStore`, `TierStore.connect` or `tiered_offload`.

    Attributes:
        table: "store" or "offload", as in a configuration file.
        name: name of the argument.
        value: the value to give; None: the default, which finds the value itself.
        reason: for people.
    """

    table: Literal["store", "offload"]
    name: str
    value: str | int | None
    reason: str


def settings_of(machine: Measurements) -> tuple[Setting, ...]:
    """The settings about which there is something to say."""
    return (*_place(machine), _host_bytes(machine), *_movement(machine), _min_bytes(machine), _lookahead())


def _set(name: str, value: str | int | None, reason: str) -> Setting:
    return Setting(table="store", name=name, value=value, reason=reason)


def _offload(name: str, value: str | int | None, reason: str) -> Setting:
    return Setting(table="offload", name=name, value=value, reason=reason)


def _place(machine: Measurements) -> Iterator[Setting]:
    """The daemon, if it keeps exactly this directory; else the directory, unless it is no place for a store."""
    drive, daemon = machine.drive, machine.daemon
    if daemon.keeps_directory:
        yield _set("connect", daemon.socket, f"a daemon serves {drive.path}, and has settings of its own for the rest")
        return
    if unfit_because(drive) is None:
        yield _set("path", drive.path, "the directory that was measured")
        reason = f"80 % of what is free, divided by the trainers: {format_bytes(drive.free_bytes)} are free now"
        yield _set("disk_bytes", None, reason)


def _host_bytes(machine: Measurements) -> Setting:
    available_bytes, trainers = machine.memory.available_bytes, machine.num_trainers
    if machine.accelerators.links:
        share, part, why = _HOST_SHARE_BESIDE_ACCELERATORS, "half", "the model itself is on the accelerator"
    else:
        share, part, why = _HOST_SHARE, "a quarter", "training itself needs memory here"
    among = "" if trainers == 1 else f", for {trainers} trainers"
    value = _size(available_bytes // share // trainers)
    if parse_size(value, "host_bytes"):
        outcome = "a step that saves less than this keeps all of it in memory and stores nothing on the drive"
    else:
        outcome = f"that is less than {format_bytes(_ROUND_BYTES)}, so a step stores everything on the drive"
    reason = f"{part} of the {format_bytes(available_bytes)} that are available{among}: {why}; {outcome}"
    return _set("host_bytes", value, reason)


def _movement(machine: Measurements) -> Iterator[Setting]:
    """Settings of how bytes move."""
    available_bytes = machine.memory.available_bytes // machine.num_trainers
    if machine.daemon.keeps_directory:
        return
    yield _set(
        "codec",
        "auto",
        f"it chooses for each kind of tensor, by the load of drive and cores; {_outlook_in_words(machine)}",
    )
    staging_bytes = min(_USUAL_STAGING_BYTES, max(_LEAST_STAGING_BYTES, available_bytes // _STAGING_SHARE))
    if staging_bytes == _USUAL_STAGING_BYTES:
        reason = "seven tensors of 16 MiB in transfer: four at the drive, and the next three"
    else:
        reason = f"a sixteenth of the {format_bytes(available_bytes)} of memory for a trainer, not the usual 112 MiB"
    yield _set("staging_bytes", _size(staging_bytes, MIB), reason)
    yield _set("inline_bytes", "128KiB", "smaller values take half the time in LMDB, larger ones longer")
    yield _set("max_write_bytes_per_day", None, "no limit; the finding about wear says what a limit would mean")


def _min_bytes(machine: Measurements) -> Setting:
    """The smallest tensor worth moving. For smaller ones the drive's latency takes longer than moving their bytes."""
    drive = machine.drive
    speeds = [speed for speed in (fastest(drive.writes), fastest(drive.reads)) if speed is not None]
    answer_seconds = max(drive.write_latency_seconds or 0.0, drive.read_latency_seconds or 0.0)
    if not speeds or not answer_seconds:
        return _offload("min_bytes", "1MiB", "the default; the drive was not measured")
    if is_drive_shared(machine) or are_cores_shared(machine):
        return _offload(
            "min_bytes", "1MiB", "the default; others used the machine, so the latency that was measured says little"
        )
    moved_bytes = int(answer_seconds * min(speeds))
    value = min(max(_LEAST_MIN_BYTES, 1 << moved_bytes.bit_length()), _MOST_MIN_BYTES)
    reason = f"while the drive answers ({1e3 * answer_seconds:.2g} ms) it could move {format_bytes(moved_bytes)}"
    if value == _LEAST_MIN_BYTES:
        reason += "; a tensor below 1 MiB costs more CPU time than the memory is worth"
    return _offload("min_bytes", _size(value, MIB), reason)


def _lookahead() -> Setting:
    return _offload(
        "lookahead_bytes", None, "as far ahead as there is room; with a fixed distance the drive is idle at times"
    )


def _size(num_bytes: int, round_bytes: int = _ROUND_BYTES) -> str:
    """A size as people write it, rounded down."""
    num_bytes = num_bytes // round_bytes * round_bytes
    return f"{num_bytes // GIB}GiB" if num_bytes and not num_bytes % GIB else f"{num_bytes // MIB}MiB"


# --- what "auto" will do ----------------------------------------------------------------------------------------------


def codec_outlook(machine: Measurements, load: Load) -> Mapping[str, str]:
    """The codec that "auto" would choose for each kind of sample data under this load, by the store's own rules."""
    write, read = fastest(machine.drive.writes), fastest(machine.drive.reads)
    chosen = {}
    for name, kind in SAMPLE_KINDS.items():
        chooser = CodecChooser()
        chooser.learn_samples(kind, _RECORD_BYTES, _samples_of(machine, name))
        if write is not None and read is not None:
            chooser.learn_write_speed(write)
            chooser.learn_read_speed(read)
        chosen[name] = str(chooser.choose(kind, _RECORD_BYTES, load, is_space_short=False).codec)
    return chosen


def _samples_of(machine: Measurements, name: str) -> list[Sample]:
    return [
        Sample(
            codec=_codec_of(speed.codec),
            raw_bytes=_SAMPLE_BYTES,
            encoded_bytes=int(speed.ratio * _SAMPLE_BYTES),
            encode_seconds=_SAMPLE_BYTES / speed.encode_bytes_per_second,
            decode_seconds=_SAMPLE_BYTES / speed.decode_bytes_per_second,
        )
        for speed in machine.codecs
        if speed.data == name
    ]


def _codec_of(text: str) -> Codec:
    return _CODECS_OF_AUTO.get(text) or parse_codec(text) or NO_CODEC


def _outlook_in_words(machine: Measurements) -> str:
    idle = _encoded(codec_outlook(machine, Load(1.0, machine.processor.usable_cores)))
    busy = _encoded(codec_outlook(machine, Load(1.0, 0.0)))
    return f"for the sample data it would encode {idle} on idle cores, and {busy} if training keeps all cores busy"


def _encoded(chosen: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({codec})" for name, codec in chosen.items() if codec != "none") or "nothing"

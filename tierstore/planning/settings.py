"""The settings to plan with: those that the trace was recorded with, unless a file or the caller says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.config import SizeLike, parse_io_depth, parse_size
from ..base.config_file import ConfigSource, FileOptions, offload_options, store_options
from ..base.defaults import NUM_AT_ONCE, NUM_BESIDE_DEVICE
from ..disk.codec.codec import parse_codec
from ..errors import ConfigError
from ..simulator import Settings, Workload
from ..tracing.events import Scope, StoreSettings
from ..tracing.reader import RecordedTrace
from ..tracing.steps import Step, steps_of

__all__ = ["last_whole_step", "planned_settings", "warnings_of"]

_CODEC_OF_A_DAEMON = "auto"  # the daemon's default; a client's trace does not record the codec


def last_whole_step(trace: RecordedTrace, source: str) -> Step:
    """The last step that was recorded from its forward to its end. `source`: the trace's file, for the message.

    Raises:
        ConfigError: there is no such step.
    """
    whole = [step for step in steps_of(trace) if step.is_whole and step.backward_began_ns is not None]
    if not whole:
        raise ConfigError(
            "trace", source, "it has no step that was recorded from its forward to the end of its backward"
        )
    return whole[-1]


def planned_settings(
    trace: RecordedTrace,
    step: Step,
    config: ConfigSource | None = None,
    store: Mapping[str, Any] | None = None,
    offload: Mapping[str, Any] | None = None,
) -> Settings:
    """The settings of each rank. `store` and `offload` override `config`, which overrides the trace. Reads files.

    Settings that have no effect on a plan (`min_bytes`, `inline_bytes`, ...) are ignored. `disk_bytes` is never taken
    from the trace, where it depended on the free space of another drive; if it is not given, ranks share the drive.
    If the trace was recorded with `device_bytes="auto"`, the size that had been found is taken.

    Args:
        trace, step: the recorded trace, and the step of it to plan.
        config: as `TierStore.from_config` takes it.
        store: arguments as `TierStore`'s: host_bytes, disk_bytes, staging_bytes, codec, io_depth.
        offload: arguments as `tiered_offload`'s: prefetch, lookahead_bytes, device_bytes.

    Raises:
        ConfigError: the file or a value cannot be used; the error says where the value is from.
    """
    if config is None:
        in_store, in_offload = _said(store), _said(offload)
    else:
        in_store, in_offload = store_options(config, store or {}), offload_options(config, offload or {})
    recorded, scope = trace.header.store, step.scope
    with in_store.naming_their_place():
        values = in_store.values
        host_bytes = _size(values, "host_bytes", recorded.host_bytes)
        staging_bytes = _size(values, "staging_bytes", recorded.staging_bytes)
        disk_bytes = _size_or_none(values, "disk_bytes", None)
        codec = values.get("codec", recorded.codec or _CODEC_OF_A_DAEMON)
        parse_codec(codec)
        io_depth = parse_io_depth(values.get("io_depth", recorded.io_depth or NUM_AT_ONCE))
        num_lanes = io_depth + NUM_BESIDE_DEVICE if "io_depth" in values else None
    with in_offload.naming_their_place():
        values = in_offload.values
        return Settings(
            host_bytes=host_bytes,
            staging_bytes=staging_bytes,
            disk_bytes=disk_bytes,
            codec=codec,
            prefetch=values.get("prefetch", scope.prefetch if scope is not None else "learned"),
            lookahead_bytes=_size_or_none(values, "lookahead_bytes", _recorded_lookahead(scope, recorded)),
            device_bytes=_device_bytes(values, 0 if scope is None else scope.device_bytes),
            num_spill_lanes=num_lanes or recorded.num_spill_lanes,
            num_restore_lanes=num_lanes or recorded.num_restore_lanes,
            num_turns=io_depth,
            staging_grows=recorded.staging_grows and in_store.values.get("staging_bytes") is None,
        )


def warnings_of(trace: RecordedTrace, workload: Workload) -> list[str]:
    """Reasons why the trace's times may mislead, for people; `workload`: as it was recorded."""
    if workload.uses_device and not trace.header.machine.launches_block:
        return [
            "Kernels were launched without waiting for them, so the times between calls of the store are the host's, "
            "not the accelerator's, and may be far too short. Record with CUDA_LAUNCH_BLOCKING=1."
        ]
    return []


def _said(values: Mapping[str, Any] | None) -> FileOptions:
    return FileOptions({}, "", "", values or {})


def _size(values: Mapping[str, Any], name: str, recorded: int) -> int:
    given: SizeLike | None = values.get(name)
    return parse_size(recorded if given is None else given, name)


def _device_bytes(values: Mapping[str, Any], recorded: int) -> int:
    if values.get("device_bytes") == "auto":
        allowed = f'give a size: "auto" finds one only in a real run; in the trace it was {recorded} bytes'
        raise ConfigError("device_bytes", "auto", allowed)
    return _size(values, "device_bytes", recorded)


def _size_or_none(values: Mapping[str, Any], name: str, recorded: int | None) -> int | None:
    return None if recorded is None and values.get(name) is None else _size(values, name, recorded or 0)


def _recorded_lookahead(scope: Scope | None, recorded: StoreSettings) -> int | None:
    """The recorded `lookahead_bytes`; None if it equals the automatic value, so that it follows the budgets."""
    if scope is None or scope.prefetch == "none":
        return None
    is_automatic = scope.lookahead_bytes == recorded.host_bytes + recorded.staging_bytes
    return None if is_automatic else scope.lookahead_bytes

"""Recommended settings of made-up machines: sound, and accepted by what they are for."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from tests.tuning.machines import GIB, LINK, MIB, drive_of_speed, machine
from tierstore import TierStore, tiered_offload
from tierstore.base.config import parse_size
from tierstore.base.config_file import offload_options, store_options
from tierstore.errors import ConfigError
from tierstore.tuning.consult import report_view
from tierstore.tuning.measurements import AcceleratorState, Measurements
from tierstore.tuning.report import config_text, report_of, settings_of


def values_of(measurements: Measurements) -> dict[str, Any]:
    return {setting.name: setting.value for setting in settings_of(measurements)}


def size_of(measurements: Measurements, name: str) -> int:
    return parse_size(values_of(measurements).get(name, "1MiB" if name == "min_bytes" else None), name)


def test_healthy_machine_keeps_the_defaults() -> None:
    settings = settings_of(machine())
    assert values_of(machine()) == {"path": "/nvme", "host_bytes": "12GiB"}
    assert all(setting.reason for setting in settings)
    assert "not fit for a store" not in config_text(settings)


def test_host_memory_and_staging_are_divided_by_the_trainers_and_more_is_left_beside_accelerators() -> None:
    little = {"available_bytes": GIB}
    assert size_of(machine(num_trainers=4), "host_bytes") == 3 * GIB
    assert size_of(machine(accelerators=AcceleratorState(links=(LINK,))), "host_bytes") == 24 * GIB
    assert size_of(machine(memory=little), "staging_bytes") == 64 * MIB
    assert size_of(machine(memory=little, num_trainers=8), "staging_bytes") == 16 * MIB


_UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"file_system": "tmpfs"}, "it is in memory"),
    ({"file_system": "nfs4"}, "it is on a network file system"),
    ({"error": "Input/output error"}, "its drive fails"),
    ({"free_bytes": 5 * MIB, "span_bytes": 0}, "only 5 MiB are free there"),
]


@pytest.mark.parametrize(("drive", "why"), _UNFIT)
def test_directory_that_is_no_place_for_a_store_is_not_recommended(
    drive: dict[str, Any], why: str, store_directory: Path, tmp_path: Path
) -> None:
    measurements = machine(drive=drive)
    assert not {"path", "connect"} & set(values_of(measurements))
    file = tmp_path / "tierstore.toml"
    file.write_text(config_text(settings_of(measurements)))
    assert "not fit for a store" in file.read_text()
    with pytest.raises(ConfigError, match="path"):
        TierStore.from_config(file)
    with TierStore.from_config(file, path=store_directory) as store:
        assert store.host_bytes == 12 * GIB
    console = Console(width=300)
    with console.capture() as captured:
        console.print(report_view(report_of(measurements)))
    assert why in captured.get()
    assert "so this directory is not recommended" in captured.get()


def test_budget_says_when_nothing_would_be_stored() -> None:
    def reason(**changes: Any) -> str:
        return next(each.reason for each in settings_of(machine(**changes)) if each.name == "host_bytes")

    assert "stores nothing on the drive" in reason()
    assert "stores everything on the drive" in reason(memory={"available_bytes": 100 * MIB})


@pytest.mark.parametrize(
    ("latency_seconds", "bytes_per_second", "expected"),
    [(8e-5, 2e9, MIB), (8e-3, 150e6, 2 * MIB), (5e-3, 1e9, 8 * MIB), (1.0, 1e9, 16 * MIB), (1.0, 1e5, MIB)],
)
def test_tensors_that_cost_waiting_rather_than_bytes_stay(
    latency_seconds: float, bytes_per_second: float, expected: int
) -> None:
    drive = drive_of_speed(bytes_per_second, 4e9) | {"read_latency_seconds": latency_seconds}
    assert size_of(machine(drive=drive), "min_bytes") == expected


def test_latency_of_a_busy_machine_is_not_trusted() -> None:
    late = {"read_latency_seconds": 5e-3}
    assert size_of(machine(drive=late), "min_bytes") == 16 * MIB
    assert size_of(machine(drive=late | {"device_bytes": 40 * GIB}), "min_bytes") == MIB
    assert size_of(machine(drive=late, processor={"load": 20.0}), "min_bytes") == MIB


def test_directory_of_a_daemon_is_reached_through_it() -> None:
    daemon = {"is_present": True, "is_answering": True, "path": "/nvme", "keeps_directory": True}
    values = values_of(machine(daemon=daemon))
    assert values["connect"] == "/run/tierstore/tierstore.sock"
    assert "path" not in values
    elsewhere = values_of(machine(daemon=daemon | {"keeps_directory": False}))
    assert elsewhere["path"] == "/nvme"


# --- all of them, on any machine --------------------------------------------------------------------------------------

_BYTES = st.integers(0, 2**44)
_SPEEDS = st.floats(1e3, 1e12)
_MACHINES = st.builds(
    lambda drive, memory, num_trainers, links, kept: machine(
        drive=drive,
        memory=memory,
        num_trainers=num_trainers,
        accelerators=AcceleratorState(links=(LINK,) * links),
        daemon={"keeps_directory": kept, "is_present": kept},
    ),
    drive=st.builds(
        lambda write, read, free, system, seconds, path: (
            drive_of_speed(write, read)
            | {"free_bytes": free, "file_system": system, "read_latency_seconds": seconds, "path": path}
        ),
        _SPEEDS,
        _SPEEDS,
        _BYTES,
        st.sampled_from(["ext4", "tmpfs", "nfs4"]),
        st.floats(1e-7, 1e3),
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=10),
    ),
    memory=st.builds(lambda available: {"available_bytes": available}, _BYTES),
    num_trainers=st.integers(1, 64),
    links=st.integers(0, 2),
    kept=st.booleans(),
)


@settings(deadline=None)
@given(_MACHINES)
def test_settings_of_any_machine_are_a_file_that_is_read_back(measurements: Measurements) -> None:
    written = tomllib.loads(config_text(settings_of(measurements)))
    recommended = {name: value for name, value in values_of(measurements).items() if value is not None}
    place = {} if {"path", "connect"} & set(recommended) else {"path": "/elsewhere"}
    assert bool(place) == (measurements.drive.file_system != "ext4" and not measurements.daemon.keeps_directory)
    found = store_options(written, place).values | offload_options(written, {}).values
    assert found == recommended | place
    for name, value in found.items():
        if name.endswith("_bytes"):
            assert parse_size(value, name) >= 0
    assert size_of(measurements, "host_bytes") * measurements.num_trainers <= measurements.memory.available_bytes // 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory": {"available_bytes": 400 * MIB}},
        {"memory": {"available_bytes": 0}},
        {"drive": drive_of_speed(1e7, 1e7) | {"read_latency_seconds": 0.01}},
        {"drive": {"writes": (), "reads": ()}},
        {"num_trainers": 8, "accelerators": AcceleratorState(links=(LINK,))},
    ],
)
def test_settings_open_a_store_and_a_scope(changes: dict[str, Any], store_directory: Path, tmp_path: Path) -> None:
    measurements = machine(**changes)
    drive = structs.replace(measurements.drive, path=str(store_directory))
    file = tmp_path / "tierstore.toml"
    file.write_text(config_text(settings_of(structs.replace(measurements, drive=drive))))
    with TierStore.from_config(file) as store:
        assert tiered_offload.from_config(store, file)
        assert store.host_bytes == size_of(measurements, "host_bytes")

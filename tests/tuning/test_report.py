"""The report on made-up machines: as programs and people read it, and the files that are made from it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.tuning.machines import GIB, LINK, MIB, machine
from tierstore import TierStore, tiered_offload
from tierstore.base.config_file import offload_options, store_options
from tierstore.errors import ConfigError
from tierstore.tuning.consult import report_view
from tierstore.tuning.measurements import AcceleratorState, Measurements
from tierstore.tuning.report import REPORT_VERSION, Report, config_text, report_of, settings_of

SCHEMA = Path(__file__).parents[2] / "docs/reference/doctor.schema.json"
LINKED = machine(accelerators=AcceleratorState(links=(LINK, LINK)))


def schema() -> Any:
    """Of the report, without our docstrings; and others may have more fields."""
    return without(json.loads(json.dumps(msgspec.json.schema(Report))), {"description", "additionalProperties"})


def without(tree: Any, keys: set[str]) -> Any:
    if isinstance(tree, dict):
        return {key: without(value, keys) for key, value in tree.items() if key not in keys}
    return [without(each, keys) for each in tree] if isinstance(tree, list) else tree


def test_report_is_read_back_as_it_was_and_its_schema_is_in_the_documentation() -> None:
    """`python -m tests.tuning.test_report` writes the schema."""
    report = report_of(LINKED)
    assert report.version == REPORT_VERSION
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == schema()


def shown(measurements: Measurements, *, verbose: bool = False) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(report_view(report_of(measurements), verbose=verbose))
    return captured.get()


def test_view_shows_verdict_settings_findings_and_limits() -> None:
    text = shown(machine(drive={"error": "it broke"}, accelerators=AcceleratorState(links=(LINK,))))
    for words in ("The drive under /nvme fails: it broke.", "host_bytes", "24GiB", "A card", "does not work well"):
        assert words in text
    lines = [line for line in shown(machine()).splitlines() if line]
    assert lines[0] == "Offloading works here."
    assert lines[1].startswith("Recommended settings")
    assert "a control group limits it to 16.00 GiB" in shown(machine(memory={"limit_bytes": 16 * GIB}))
    assert "activations, bfloat16" not in text
    assert "activations, bfloat16" in shown(machine(), verbose=True)


def test_view_of_a_busy_machine_says_so_before_its_findings() -> None:
    nothing_else = {"drive": {"model": None}}
    assert "Findings: none" in shown(machine(**nothing_else, processor={"load": 2.0}))
    text = shown(machine(**nothing_else, processor={"num_present": 2, "load": 11.04, "waiting_share": 0.83}))
    (line,) = [line for line in text.splitlines() if "busy" in line]
    told = "The machine is busy: load 11 on 2 cores, and work waited for a core in 83% of the last 10 seconds. Times"
    assert line.startswith(told)
    assert "Other findings: none" in text
    assert "load 30 on 16 cores. Times" in shown(machine(processor={"load": 30.0}))


def test_view_of_names_that_steer_a_terminal_is_harmless() -> None:
    steering = AcceleratorState(links=(msgspec.structs.replace(LINK, name="[red]\x1b[2J"),))
    text = shown(machine(drive={"file_system": "\x1b[31mred", "path": "/a[bold]b"}, accelerators=steering))
    assert "\x1b" not in text
    assert "/a[bold]b" in text
    assert "[red]" in text


# --- recommended settings ---------------------------------------------------------------------------------------------


def values_of(measurements: Measurements) -> dict[str, str]:
    return {setting.name: setting.value for setting in settings_of(measurements)}


STRANGE = '/a "b"\\c\n\u00e9'
KEPT = {"is_present": True, "is_answering": True, "path": "/nvme", "keeps_directory": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, {"path": "/nvme", "host_bytes": "12GiB"}, id="the defaults"),
        pytest.param({"num_trainers": 4}, {"path": "/nvme", "host_bytes": "3GiB"}, id="four trainers"),
        pytest.param(
            {"accelerators": AcceleratorState(links=(LINK,))}, {"path": "/nvme", "host_bytes": "24GiB"}, id="a card"
        ),
        pytest.param(
            {"daemon": KEPT}, {"connect": "/run/tierstore/tierstore.sock", "host_bytes": "12GiB"}, id="a daemon's"
        ),
        pytest.param(
            {"daemon": KEPT | {"keeps_directory": False}}, {"path": "/nvme", "host_bytes": "12GiB"}, id="another's"
        ),
        pytest.param({"drive": {"path": STRANGE}}, {"path": STRANGE, "host_bytes": "12GiB"}, id="a strange path"),
        pytest.param({"memory": {"available_bytes": 145 * MIB}}, {"path": "/nvme", "host_bytes": "18MiB"}, id="little"),
        pytest.param({"memory": {"available_bytes": 900 * MIB}}, {"path": "/nvme", "host_bytes": "114MiB"}, id="more"),
        pytest.param({"memory": {"available_bytes": 4 * MIB}}, {"path": "/nvme", "host_bytes": "0MiB"}, id="none"),
    ],
)
def test_settings_of_a_machine(changes: dict[str, Any], expected: dict[str, str]) -> None:
    assert values_of(machine(**changes)) == expected
    written = tomllib.loads(config_text(settings_of(machine(**changes))))
    assert store_options(written, {}).values | offload_options(written, {}).values == expected
    reason = settings_of(machine(**changes))[-1].reason
    outcome = "stores everything on the drive" if expected["host_bytes"] == "0MiB" else "stores nothing on the drive"
    assert outcome in reason


@pytest.mark.parametrize(
    ("drive", "why"),
    [
        ({"file_system": "tmpfs"}, "it is in memory"),
        ({"file_system": "nfs4"}, "it is on a network file system"),
        ({"error": "Input/output error"}, "its drive fails"),
        ({"free_bytes": 5 * MIB, "span_bytes": 0}, "only 5 MiB are free there"),
    ],
)
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
        assert tiered_offload.from_config(store, file)
    assert why in shown(measurements)
    assert "so this directory is not recommended" in shown(measurements)


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")

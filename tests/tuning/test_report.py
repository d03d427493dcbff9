"""The report as programs read it, and the files that are made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tests.tuning.machines import LINK, machine
from tierstore.hardware import hardware_text, read_hardware
from tierstore.tuning.consult import report_view
from tierstore.tuning.measurements import AcceleratorState
from tierstore.tuning.report import REPORT_VERSION, Report, hardware_of, report_of

SCHEMA = Path(__file__).parents[2] / "docs/reference/doctor.schema.json"


def schema() -> Any:
    """Of the report, without our docstrings; and others may have more fields."""
    return without(json.loads(json.dumps(msgspec.json.schema(Report))), {"description", "additionalProperties"})


def without(tree: Any, keys: set[str]) -> Any:
    if isinstance(tree, dict):
        return {key: without(value, keys) for key, value in tree.items() if key not in keys}
    return [without(each, keys) for each in tree] if isinstance(tree, list) else tree


def test_report_is_read_back_as_it_was() -> None:
    report = report_of(machine(accelerators=AcceleratorState(links=(LINK,))))
    assert report.version == REPORT_VERSION
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_schema_in_the_documentation_is_the_reports() -> None:
    """`python -m tests.tuning.test_report` writes it."""
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == schema()


def test_description_has_what_was_measured(tmp_path: Path) -> None:
    measurements = machine(accelerators=AcceleratorState(links=(LINK, LINK)))
    described = hardware_of(measurements)
    assert described is not None
    file = tmp_path / "hw.toml"
    file.write_text(hardware_text(described))
    found = read_hardware(file)
    assert found == described
    assert (found.drive.writes, found.drive.reads) == (measurements.drive.writes, measurements.drive.reads)
    assert (found.codecs, found.accelerators) == (measurements.codecs, (LINK, LINK))
    assert (found.host.cores, found.drive.capacity_bytes) == (16.0, measurements.drive.free_bytes)


def test_description_of_a_drive_that_was_not_measured_is_none() -> None:
    for missing in ({"writes": ()}, {"reads": ()}, {"write_latency_seconds": None}, {"read_latency_seconds": None}):
        assert hardware_of(machine(drive=missing)) is None


def shown(report: Report, *, verbose: bool = False) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    with console.file:
        console.print(report_view(report, verbose=verbose))
    return console.export_text()


def test_view_shows_verdict_settings_and_findings_and_more_only_when_asked() -> None:
    text = shown(report_of(machine(drive={"error": "it broke"}, accelerators=AcceleratorState(links=(LINK,)))))
    for words in ("The drive under /nvme fails: it broke.", "host_bytes", "24GiB", "A card", "does not work well"):
        assert words in text
    report = report_of(machine())
    lines = [line for line in shown(report).splitlines() if line]
    assert lines[0] == "Offloading works here."
    assert lines[1].startswith("Recommended settings")
    for word in ("shuffle-zstd:1", "16 MiB"):
        assert word not in shown(report)
        assert word in shown(report, verbose=True)
    assert "glibc; a store returns freed memory when it is short" in shown(report)
    left_alone = {"allocator": "musl", "allocator_left_alone": "musl offers no way"}
    assert "musl; a store leaves it alone: musl offers no way" in shown(report_of(machine(memory=left_alone)))


def test_view_of_names_that_steer_a_terminal_is_harmless() -> None:
    text = shown(report_of(machine(drive={"model": "\x1b[31mred", "path": "/a[bold]b"})))
    assert "\x1b" not in text
    assert "/a[bold]b" in text


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")

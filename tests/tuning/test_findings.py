"""What is said of made-up machines."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.tuning.machines import GIB, LINK, MIB, drive_of_speed, machine
from tierstore.tuning import findings as source
from tierstore.tuning.findings import Finding, findings_of
from tierstore.tuning.measurements import AcceleratorState, rate
from tierstore.tuning.report import report_of

PAGE = Path(__file__).parents[2] / "docs/project/internals/doctor.md"


def link(**changes: Any) -> AcceleratorState:
    return AcceleratorState(links=(structs.replace(LINK, **changes),))


NOT_MEASURED = {"span_bytes": 0, "writes": (), "reads": (), "write_latency_seconds": None, "read_latency_seconds": None}

CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("drive-fails", "problem", {"drive": {"error": "Input/output error"}}, "Input/output error"),
    ("drive-full", "problem", {"drive": {"free_bytes": 5 * MIB} | NOT_MEASURED}, "5 MiB"),
    ("little-space", "warning", {"drive": {"free_bytes": 15 * GIB}}, "15.00 GiB"),
    ("in-memory", "problem", {"drive": {"file_system": "tmpfs"}}, "tmpfs"),
    ("in-memory", "warning", {"drive": {"file_system": "ramfs"}, "accelerators": link()}, "ramfs"),
    ("in-memory", "problem", {"drive": {"file_system": "overlay", "io_mode": "buffered (tmpfs under overlayfs)"}},
        "tmpfs under overlayfs"),
    ("network-drive", "warning", {"drive": {"file_system": "nfs4"}}, "nfs4"),
    ("no-direct-io", "warning", {"drive": {"io_mode": "buffered (nfs)"}}, "nfs"),
    ("drive-very-slow", "problem", {"drive": drive_of_speed(150e6, 3e9)}, "150 MB/s"),
    ("drive-very-slow", "problem", {"drive": drive_of_speed(3e9, 150e6)}, "150 MB/s"),
    ("drive-slow", "warning", {"drive": drive_of_speed(500e6, 550e6)}, "500 MB/s"),
    ("drive-answers-late", "warning", {"drive": {"write_latency_seconds": 2e-2}},
        "20.0 ms to answer a request of 4 KiB.Measure again"),
    ("wear", "note", {}, "600 times its size"),
    ("accelerator-fails", "warning", {"accelerators": AcceleratorState(error="cuda:0 is broken")}, "cuda:0 is broken"),
    ("not-pinned", "warning",
        {"accelerators": link(host_memory="pageable (no)"), "limits": {"locked_bytes": 8 * MIB}}, "8 MiB"),
    ("link-slow", "warning", {"accelerators": link(to_device_bytes_per_second=3e9)}, "3 GB/s"),
    ("little-memory", "warning", {"memory": {"available_bytes": 3 * GIB}}, "3.00 GiB"),
    ("little-memory", "problem", {"memory": {"available_bytes": 500 * MIB}}, "500 MiB"),
    ("swapping", "warning", {"memory": {"swap_used_bytes": 5 * GIB}}, "5.00 GiB"),
    ("no-caching-allocator", "note", {"memory": {"no_caching_allocator": "it is not built"}}, "it is not built"),
    ("memory-not-returned", "note",
        {"memory": {"allocator_left_alone": "MALLOC_X is set", "no_caching_allocator": "it is not built"}}, "MALLOC_X"),
    ("no-huge-pages", "warning", {"memory": {"huge_pages": "never"}}, "transparent_hugepage"),
    ("no-huge-pages", "warning", {"memory": {"huge_pages": None}}, "transparent_hugepage"),
    ("cpu-quota", "note", {"processor": {"quota_cores": 2.5}}, "2.5 of 16"),
    ("one-core", "warning", {"processor": {"quota_cores": 0.5}}, "two cores"),
    ("few-descriptors", "warning", {"limits": {"open_files": 256}}, "256 files"),
    ("few-descriptors", "problem", {"limits": {"open_files": 32}}, "32 files"),
    ("daemon-runs", "note", {"daemon": {"is_present": True, "is_answering": True, "path": "/fast"}}, "/fast"),
    ("daemon-silent", "warning", {"daemon": {"is_present": True, "note": "it hangs"}}, "it hangs"),
    ("daemon-refuses", "warning", {"daemon": {"is_present": True, "is_refusing": True, "note": "not you"}}, "not you"),
]  # fmt: skip


def found(**changes: Any) -> dict[str, Finding]:
    return {finding.code: finding for finding in findings_of(machine(**changes))}


def test_healthy_machine_has_a_note_on_wear_and_nothing_else() -> None:
    assert set(found()) == {"wear"}
    assert "would last 6 days" in found()["wear"].sentence
    assert report_of(machine()).is_usable


@pytest.mark.parametrize("drive", [{"model": None}, {"size_bytes": 10**15}, {"is_rotational": True}, {"writes": ()}])
def test_drive_that_is_virtual_rotates_or_lasts_for_years_raises_no_question_of_wear(drive: dict[str, Any]) -> None:
    assert found(drive=drive) == {}


@pytest.mark.parametrize(("code", "severity", "changes", "words"), CASES, ids=[case[0] for case in CASES])
def test_change_of_a_healthy_machine_is_found(code: str, severity: str, changes: dict[str, Any], words: str) -> None:
    finding = found(**changes)[code]
    assert finding.severity == severity
    assert words in finding.sentence + (finding.advice or "")
    assert report_of(machine(**changes)).is_usable == (severity != "problem")
    assert all(each.sentence.endswith(".") for each in found(**changes).values())
    assert severity != "problem" or finding.advice


def test_each_code_has_a_case_and_a_line_in_the_documentation() -> None:
    codes = re.findall(r'_(?:problem|warning|note)\)?\(\s*"([a-z-]+)"', inspect.getsource(source))
    assert {code for code, _, _, _ in CASES} == set(codes)
    documented = re.findall("`([a-z]+(?:-[a-z]+)*)`", PAGE.read_text(encoding="utf-8").partition("## The report")[0])
    assert set(documented) - {"never"} == set(codes)


@pytest.mark.parametrize(
    ("processor", "is_busy"),
    [
        ({"load": 23.9}, False),
        ({"load": 24.0}, True),
        ({"load": 0.5, "waiting_share": 0.2}, True),
        ({"load": 90.0, "waiting_share": 0.19}, False),
        ({"load": None, "waiting_share": None}, False),
    ],
)
def test_busy_machine_is_told_by_what_waits_or_else_by_its_load_and_is_no_finding(
    processor: dict[str, Any], is_busy: bool
) -> None:
    report = report_of(machine(processor=processor))
    assert report.is_busy == is_busy
    assert report.findings == report_of(machine()).findings


def test_worst_is_said_first() -> None:
    bad = machine(drive=drive_of_speed(1e8, 1e8), memory={"huge_pages": None}, limits={"open_files": 5})
    assert [finding.severity for finding in findings_of(bad)] == ["problem", "problem", "warning", "note"]


def test_drive_that_is_not_measured_is_not_judged() -> None:
    assert set(found(drive={"free_bytes": 0} | NOT_MEASURED)) == {"drive-full"}


def test_rate_is_said_in_decimal_units() -> None:
    said = {0.5: "0.5 B/s", 2e3: "2 kB/s", 3.25e6: "3.25 MB/s", 1.5e10: "15 GB/s"}
    assert {speed: rate(speed) for speed in said} == said

"""The matrix: which rows fail it, what its table says; its rows themselves take minutes each (`make matrix`)."""

import datetime
import sys
from pathlib import Path

import pytest

from tests.matrix.environments import ROOT, NotAvailableError, Workshop, find_python, requirement_of
from tests.matrix.rows import SUITE, Row, outcome_with, run_row, table_of, written_into


def test_files_of_the_suite_exist() -> None:
    assert [file for file in SUITE if not (ROOT / "tests" / file).is_file()] == []


def test_oldest_torch_is_what_the_project_allows() -> None:
    assert requirement_of("oldest") == "torch==2.11.*"
    assert requirement_of("newest") == "torch"
    assert requirement_of("2.13.0") == "torch==2.13.0"


def test_interpreter_is_found_by_path_and_one_that_is_missing_is_told() -> None:
    assert find_python(sys.executable) == Path(sys.executable)
    with pytest.raises(NotAvailableError, match=r"no interpreter python3\.99"):
        find_python("3.99")


def test_row_that_cannot_be_had_has_a_reason_and_is_not_broken(tmp_path: Path) -> None:
    row = run_row(Workshop(tmp_path), "newest", "3.99")
    assert row == Row("newest", "3.99", reason="no interpreter python3.99 is found")
    assert not row.is_broken


@pytest.mark.parametrize(
    ("source", "counts", "is_broken"),
    [("def test_it(): pass", (1, 0, 0), False), ("def test_it(): assert False", (0, 0, 1), True)],
)
def test_row_is_broken_where_a_test_fails(
    tmp_path: Path, source: str, counts: tuple[int, int, int], is_broken: bool
) -> None:
    (tmp_path / "test_it.py").write_text(source, encoding="utf-8")
    row = outcome_with(Path(sys.executable), tmp_path / "row.xml", [str(tmp_path / "test_it.py")])
    assert ((row.passed, row.skipped, row.failed), row.is_broken) == (counts, is_broken)


@pytest.mark.slow
def test_run_that_ends_early_is_broken(tmp_path: Path) -> None:
    row = outcome_with(Path(sys.executable), tmp_path / "row.xml", [str(tmp_path / "none.py")])
    assert row.is_broken
    assert "pytest ended with 4" in row.reason


def test_table_takes_the_place_of_the_one_before() -> None:
    ended = Row("2.11.0", "3.12.1", reason="ended | see a.log", is_broken=True)
    rows = [Row("2.15.0", "3.13.0", 900, 3, 0), Row("oldest", "3.14", reason="no wheel"), ended]
    table = table_of(rows, datetime.date(2026, 11, 23))
    assert "| 2.15.0 | 3.13.0 | 900 | 3 | 0 |" in table
    assert "| 2.11.0 | 3.12.1 | ended / see a.log | - | - |" in table
    assert "3.14" not in table, "what cannot be installed says nothing"
    page = "above\n<!-- matrix: begin -->\nold\n<!-- matrix: end -->\nbelow\n"
    assert written_into(page, table) == f"above\n<!-- matrix: begin -->\n{table}<!-- matrix: end -->\nbelow\n"
    with pytest.raises(ValueError, match="no lines"):
        written_into("above", table)


def test_page_has_a_place_for_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
    assert "Run on 2" in page
    assert written_into(page, "table\n") != page

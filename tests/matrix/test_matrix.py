"""The matrix: which rows fail it, what its table says; its rows themselves take minutes each (`make matrix`)."""

import datetime
import sys
from pathlib import Path

import pytest

from tests.matrix.rows import ROOT, SUITE, Row, outcome_with, requirements_with, run_row, table_of, written_into


def test_suite_and_requirements_are_those_of_the_project() -> None:
    assert [file for file in SUITE if not (ROOT / "tests" / file).is_file()] == []
    firsts = [requirements_with(torch)[0] for torch in ("oldest", "newest", "2.13.0")]
    assert firsts == ["torch==2.11.*", "torch", "torch==2.13.0"]


def test_row_that_cannot_be_had_has_a_reason_and_is_not_broken(tmp_path: Path) -> None:
    assert run_row(tmp_path, "newest", "3.99") == Row("newest", "3.99", reason="no interpreter python3.99 is found")


@pytest.mark.slow  # runs pytest three times
def test_row_is_broken_where_a_test_fails_or_the_run_ends_early(tmp_path: Path) -> None:
    file, python = tmp_path / "test_it.py", Path(sys.executable)
    file.write_text("def test_it(): pass\ndef test_other(): assert False", encoding="utf-8")
    one, all_, none = (
        outcome_with(python, tmp_path / "row.xml", [choice]) for choice in (f"{file}::test_it", str(file), "no_file.py")
    )
    assert ((one.passed, one.skipped, one.failed), one.is_broken) == ((1, 0, 0), False)
    assert ((all_.passed, all_.skipped, all_.failed), all_.is_broken) == ((1, 0, 1), True)
    assert none.is_broken
    assert "pytest ended with 4" in none.reason


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
    real = (ROOT / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
    assert "Run on 2" in real
    assert written_into(real, "table\n") != real

"""Every fault at every stage of a step, under a store on directories: right bits or the promised error, and no leak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.census import Census
from tests.testing.fault_matrix import LOST, Case, cases, cases_of_a_daemon, on_one_drive_and_two
from tests.testing.faulty_step import LocalFaults, run_case, training_of
from tierstore.testing import FaultyStore, SimulatedCopies

CASES = list(cases())


@pytest.fixture
def directories(tmp_path: Path, num_drives: int) -> Iterator[list[Path]]:
    """Empty, and empty again at the end."""
    found = [tmp_path / f"drive {number}" for number in range(num_drives)]
    for directory in found:
        directory.mkdir()
    yield found
    assert not [path for directory in found for path in directory.iterdir()], "files were left behind"


@pytest.mark.parametrize(("case", "num_drives"), on_one_drive_and_two(CASES))
def test_fault_in_a_step_right_bits_or_the_promised_error(
    directories: list[Path], census: Census, case: Case, num_drives: int
) -> None:
    training = training_of(192 if case.is_of_system_calls else 64)
    with SimulatedCopies() if case.stage in ("offload", "reload") else nullcontext() as copies:
        store = FaultyStore(
            directories,
            host_bytes=0,
            disk_bytes="1GiB",
            staging_bytes=training.nbytes if case.stage in ("pack", "offload") else "16MiB",
            codec=case.codec,
            copies=copies,
        )
        came = run_case(training, store, LocalFaults(store.faults), case, num_drives)
    census.count(f"injected faults, drives: {num_drives}, at {case.stage}", came)


def test_page_of_promises_has_the_number_of_cases() -> None:
    page = (Path(__file__).parents[2] / "docs" / "project" / "internals" / "reliability.md").read_text(encoding="utf-8")
    daemon_cases, lost = len(list(cases_of_a_daemon())), 2 * len(LOST)
    assert f"{len(CASES)} cases under a store on a directory" in page
    assert f"{daemon_cases} + {lost} through a daemon" in page

"""Every fault at every stage of a step, under a store on directories: right bits or the promised error, and no leak."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.census import Census
from tests.testing.fault_matrix import LOST, Case, cases, cases_of_a_daemon, usual_first
from tests.testing.faulty_step import LocalFaults, run_case, training_of
from tierstore.testing import FaultyStore, SimulatedCopies

CASES = list(cases())


@pytest.mark.parametrize("case", usual_first(CASES))
def test_fault_in_a_step_right_bits_or_the_promised_error(store_directory: Path, census: Census, case: Case) -> None:
    training = training_of(192 if case.is_of_system_calls else 64)
    with SimulatedCopies() if case.stage in ("offload", "reload") else nullcontext() as copies:
        store = FaultyStore(
            store_directory,
            host_bytes=0,
            disk_bytes="1GiB",
            staging_bytes=training.staging_bytes(case.stage),
            codec=case.codec,
            copies=copies,
        )
        came = run_case(training, store, LocalFaults(store.faults), case)
    census.count(f"injected faults, at {case.stage}", came)


def test_page_of_promises_has_the_number_of_cases() -> None:
    page = (Path(__file__).parents[2] / "docs" / "project" / "internals" / "reliability.md").read_text(encoding="utf-8")
    daemon_cases, lost = len(list(cases_of_a_daemon())), 2 * len(LOST)
    assert f"{len(CASES)} cases under a store on a directory" in page
    assert f"{daemon_cases} + {lost} through a daemon" in page

"""The tables of a plan, on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO

import pytest
from rich.console import Console

from tests.planning.made_up import GB, MIB, accelerator, chain, machine
from tierstore.commands.plan_views import copies_table, costs_table, moved_table, remarks, steps_table
from tierstore.planning import Answer, Machine, Use, answer, find_machine, shipped_machines
from tierstore.simulator import Settings, Workload

_LONGEST = max((each.name for each in shipped_machines()), key=len)
_USE = Use(price_per_hour=3.0)
_SOME = Settings(host_bytes=32 * MIB)
_SIZES = (16 * MIB,) * 20


def _answers(workload: Workload, settings: Settings, where: Machine, *ranks: int) -> list[Answer]:
    return [answer(workload, where, settings, num_ranks=num_ranks, use=_USE) for num_ranks in ranks]


def _tables(answers: Sequence[Answer]) -> Iterator[Sequence[str]]:
    """The lines of each that has a row."""
    for table in (steps_table(answers), copies_table(answers), moved_table(answers), costs_table(answers)):
        if table.row_count:
            screen = StringIO()
            Console(file=screen, width=80).print(table)
            yield screen.getvalue().splitlines()


@pytest.mark.parametrize(
    ("workload", "num_tables"),
    [
        (chain(_SIZES), 3),
        (chain(_SIZES, gap_seconds=100.0), 3),
        *((chain(_SIZES).on_accelerator(speed), 4) for speed in (0.0001, 1.0, 40.0, 4000.0, 4e6)),
    ],
)
def test_tables_fit_80_columns_and_fold_no_name(workload: Workload, num_tables: int) -> None:
    answers = _answers(workload, _SOME, find_machine(_LONGEST), 1, 8)
    tables = list(_tables(answers))
    assert len(tables) == num_tables
    for header, *rows in tables:
        assert len(header) <= 80
        assert "\u2026" not in header, "nothing is cut"
        assert [row.split()[:2] for row in rows] == [[_LONGEST, "1"], [_LONGEST, "8"]]
        assert not any("\u2026" in row for row in rows)


def _said(workload: Workload, settings: Settings, where: Machine) -> str:
    return "\n".join(remarks(_answers(workload, settings, where, 1), _USE))


def test_remarks_explain_what_is_only_on_an_accelerator_where_there_is_one() -> None:
    slow_link = machine(accelerators=(accelerator(0.5 * GB),))
    on_device = _said(chain(_SIZES).on_accelerator(1.0), _SOME, slow_link)
    assert "On device:" in on_device
    assert "link: copies from and to the accelerator" in on_device
    assert on_device.endswith("(link)")
    in_memory = _said(chain(_SIZES), _SOME, machine(0.2 * GB))
    assert "drive writes" in in_memory
    assert "accelerator" not in in_memory


@pytest.mark.parametrize(
    ("device_bytes", "host_bytes", "where"),
    [(GB, 0, "on the accelerator"), (0, GB, "in memory"), (GB // 4, GB, "in memory")],
)
def test_remarks_say_where_all_stays_of_a_step_that_writes_nothing(
    device_bytes: int, host_bytes: int, where: str
) -> None:
    settings = Settings(host_bytes, device_bytes=device_bytes)
    said = _said(chain(_SIZES).on_accelerator(1.0), settings, machine(accelerators=(accelerator(),)))
    assert f"writes nothing: all saved tensors stay {where}." in said

"""The planned fleet: the step and its limits are within what arithmetic by hand gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.fleet_limits import CpuCosts, cpu_costs
from bench.fleet_plan import DEVICE_BYTES, HOST_BYTES, Row, plan, share_of_host
from bench.fleet_report import AS_MEASURED, SPECIFIED, conclusions, draw, interpreters, table
from bench.fleet_step import EVERYTHING, INPUTS, KEPT, MODEL, NUM_RANKS, PRODUCTS, step_of_rank
from tierstore.simulator import Settings, simulate
from tierstore.simulator.from_hardware import hardware_of
from tierstore.tuning.machines import find_machine

COSTS = CpuCosts(record=1e-3, byte=2e-10, daemon_record=4e-3, daemon_byte=1e-9)
SHALLOW = replace(MODEL, layers=3)
TOKENS = 131072 // 8


def _row(kept: str, num_drives: int = 8, name: str = SPECIFIED) -> Row:
    (row,) = plan(find_machine(name), kept, COSTS, SHALLOW, [num_drives])
    return row


@pytest.mark.parametrize(
    ("kept", "bytes_per_token"),
    [
        (EVERYTHING, 2 * (6 * 8192 + 2 * 1024 + 4 * 28672) + 4 * 64),
        (PRODUCTS, 2 * (4 * 8192 + 2 * 1024 + 2 * 28672) + 4 * 64),
        (INPUTS, 2 * 8192),
    ],
)
def test_step_of_rank_saves_and_computes_what_the_shapes_say(kept: str, bytes_per_token: int) -> None:
    workload = step_of_rank(MODEL, KEPT[kept])
    assert sum(saved.nbytes for saved in workload.saved) == TOKENS * bytes_per_token * 80
    products = 2 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672) + 2 * 131072 * 8192  # of a token in a block, in forward
    forward_seconds = TOKENS * (80 * products + 2 * 8192 * 128256) / 380e12
    again_seconds = {EVERYTHING: 0.0, PRODUCTS: 0.14, INPUTS: forward_seconds}[kept]
    assert workload.compute_seconds == pytest.approx(3 * forward_seconds + again_seconds, rel=0.01)


def test_planned_step_is_no_shorter_than_its_busiest_resource_and_no_longer_than_all_in_turn() -> None:
    row = _row(EVERYTHING)
    found, busy = row.prediction, row.busy
    assert found is not None
    assert busy is not None
    depth = SHALLOW.layers / MODEL.layers
    saved = TOKENS * 332_032 * SHALLOW.layers
    on_drives = saved - (HOST_BYTES + DEVICE_BYTES) * depth
    assert on_drives <= found.written_bytes <= 1.5 * saved
    assert found.offloaded_bytes >= saved - DEVICE_BYTES * depth
    assert busy.drives == pytest.approx(8 * (found.written_bytes / 80e9 + found.read_bytes / 112e9))
    assert busy.link == pytest.approx((found.offloaded_bytes + found.reloaded_bytes) / 50e9)
    moved = found.offloaded_bytes + found.reloaded_bytes + 2 * (found.written_bytes + found.read_bytes)
    assert busy.memory == pytest.approx(8 * moved / 4.2e11)
    assert busy.interpreter == pytest.approx(13 * SHALLOW.layers * COSTS.record)
    assert busy.daemon_interpreter == pytest.approx(8 * 13 * SHALLOW.layers * COSTS.daemon_record)
    assert busy.daemon_memory > busy.memory
    longest = max(found.compute_seconds, busy.drives, busy.memory, busy.link / 2)
    assert longest < found.seconds < found.compute_seconds + busy.drives + busy.memory + busy.link


def test_planned_wear_is_bytes_written_of_bytes_rated() -> None:
    row = _row(EVERYTHING)
    assert row.prediction is not None
    assert row.wear is not None
    bytes_per_day = row.prediction.written_bytes / row.prediction.seconds * 86400  # eight ranks on eight drives
    assert row.wear.writes_per_day == pytest.approx(bytes_per_day / 6.4e12)
    assert row.wear.days == pytest.approx(35_040e12 / bytes_per_day)
    assert row.wear.drives_per_year == pytest.approx(64 * 8 * 365 / row.wear.days)
    assert _row(EVERYTHING, name=AS_MEASURED).wear is None, "their endurance is not known"


def test_share_of_host_is_as_fast_for_one_rank_as_the_host_for_all() -> None:
    workload, machine = step_of_rank(replace(MODEL, layers=1), KEPT[EVERYTHING]), find_machine(SPECIFIED)
    settings = Settings(2 * 10**9, device_bytes=10**9, staging_grows=True)
    all_ranks = simulate(workload, hardware_of(machine.hardware), settings, num_ranks=NUM_RANKS)
    (alone,) = simulate(workload, hardware_of(share_of_host(machine, 8).hardware), settings)
    slowest = max(steps[-1].seconds for steps in all_ranks)
    assert alone[-1].seconds == pytest.approx(slowest, rel=0.05)


def test_cpu_costs_take_two_sizes_of_records_apart(tmp_path: Path) -> None:
    def line(variant: str, **figures: float) -> str:
        return json.dumps({"variant": variant, "figures": figures}) + "\n"

    short, long = (500 + num_bytes * 2e-4 for num_bytes in (2**18, 2**22))
    (tmp_path / "record_cost.jsonl").write_text(
        line("1,024 of 256 KiB", put_cpu_microseconds=short, get_cpu_microseconds=0.0)
        + line("128 of 4 MiB", put_cpu_microseconds=0.0, get_cpu_microseconds=long)
    )
    names = [f"{who}_{way}_cpu_seconds_per_gb" for who in ("daemon", "sidecar") for way in ("spill", "restore")]
    sidecar = dict(zip(names, (0.1, 0.2, 0.3, 0.4), strict=True))
    (tmp_path / "sidecar_throughput.jsonl").write_text(line("one client", **sidecar))
    costs = cpu_costs(tmp_path)
    assert costs == pytest.approx((5e-4, 2e-10, (3e-10 - 2e-10) * 2**24, 1e-9))


def test_report_has_a_row_for_each_count_its_conclusions_and_a_plot(tmp_path: Path) -> None:
    model, machine = replace(MODEL, layers=2), find_machine(SPECIFIED)
    rows_of = {kept: plan(machine, kept, COSTS, model, [1, 8]) for kept in (EVERYTHING, PRODUCTS)}
    found = {(kept, name): rows for kept, rows in rows_of.items() for name in (SPECIFIED, AS_MEASURED)}
    (checkpointed,) = plan(machine, INPUTS, COSTS, model, [1])
    seconds = [row.prediction.seconds for row in found[EVERYTHING, SPECIFIED] if row.prediction]
    fewer = [row.prediction.seconds for row in found[PRODUCTS, SPECIFIED] if row.prediction]
    assert seconds[0] > seconds[1] > fewer[1]
    assert seconds[0] > fewer[0] > fewer[1]
    rows = table(found[EVERYTHING, SPECIFIED]).splitlines()
    assert [line.split(" | ")[0] for line in rows[2:]] == ["| 1", "| 8"]
    assert "drive" in rows[2], "with one drive, that is the bound"
    assert len(conclusions(found, checkpointed, COSTS, model).splitlines()) == 9
    assert interpreters(COSTS, MODEL).splitlines()[2].endswith("| 1.0 | 33.3 |"), "1040 records in each of eight ranks"
    draw(found, checkpointed, tmp_path / "fleet.png")
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")

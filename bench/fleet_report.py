"""Tables, conclusions and the plot of `fleet.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, never a window

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tierstore.tuning.machines import find_machine

from .fleet_limits import NUM_HOSTS, CpuCosts
from .fleet_plan import DRIVES, Row
from .fleet_step import EVERYTHING, KEPT, NUM_RANKS, PRODUCTS, Model, step_of_rank

__all__ = ["AS_MEASURED", "SPECIFIED", "conclusions", "draw", "interpreters", "table"]

SPECIFIED, AS_MEASURED = "eight-h200", "eight-h200-cloud"
"""Machines: with the drives of a data sheet, and with drives as others measured them."""

LENGTHS = (8192, 32768, 131072)

_OURS, _OTHERS, _TEXT = "#1f6f9f", "#b9c2c9", "#333333"
_BUSY = {
    "drives": "#c2703d",
    "memory": "#9fc5a2",
    "link": "#e3c567",
    "daemon_interpreter": "#9b59b6",
    "cores": "#7d8790",
    "interpreter": "#d3a4c4",
}
_WORDS = {"link": "PCIe", "daemon_interpreter": "one daemon's interpreter", "interpreter": "a rank's interpreter"}
_YEAR_HOURS = 8760.0

Found = Mapping[tuple[str, str], Sequence[Row]]


def table(rows: Sequence[Row]) -> str:
    """A line of Markdown for each number of drives; times in seconds, of one step of a host."""
    head = (
        "drives",
        "step",
        "of compute alone",
        "bound by",
        "TB written",
        "drives busy",
        "memory busy",
        "PCIe busy",
        "cores busy",
        "days until worn",
        "drives a year",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(row))} |" for row in rows)])


def _cells(row: Row) -> list[str]:
    found, busy = row.prediction, row.busy
    if found is None or busy is None:
        misfit = row.misfit
        what = "" if misfit is None else f": {misfit.tier}, {NUM_RANKS * misfit.needed_bytes / 1e12:.2f} TB needed"
        return [str(row.num_drives), f"does not fit{what}", *["-"] * 9]
    wear = ["-", "-"] if row.wear is None else [f"{row.wear.days:,.0f}", f"{row.wear.drives_per_year:,.0f}"]
    return [
        str(row.num_drives),
        f"{found.seconds:.1f}",
        f"{found.slowdown:.2f}",
        _WORDS.get(found.limit, found.limit),
        f"{NUM_RANKS * found.written_bytes / 1e12:.2f}",
        *(f"{each:.1f}" for each in (busy.drives, busy.memory, busy.link, busy.cores)),
        *wear,
    ]


def conclusions(found: Found, checkpointed: Row, costs: CpuCosts, model: Model) -> str:
    """What the page says beside the tables."""
    dollars_per_hour = (find_machine(SPECIFIED).hardware.host.price_per_hour or 0.0) * NUM_HOSTS
    computed_seconds = _compute_seconds(found)
    lines = [f"* a year of {NUM_HOSTS} hosts: {dollars_per_hour * _YEAR_HOURS / 1e6:.1f} million dollars"]
    for (kept, name), rows in found.items():
        lines.append(_conclusion(f"{kept}, {name}", rows[-1], computed_seconds, dollars_per_hour))
    lines.append(_conclusion("checkpointing every block", checkpointed, computed_seconds, dollars_per_hour))
    lines.append(
        f"* CPU time of a record, down and up: {1e3 * costs.record:.2f} ms beyond its bytes, in a daemon "
        f"{1e3 * costs.daemon_record:.2f} ms; of a GB: {1e9 * costs.byte:.3f} s, through a daemon "
        f"{1e9 * costs.daemon_byte:.3f} s"
    )
    for kept in (EVERYTHING, PRODUCTS):
        busy = found[kept, SPECIFIED][-1].busy
        if busy is not None:
            lines.append(
                f"* {kept}, with one daemon: memory busy {busy.daemon_memory:.1f} s, cores {busy.daemon_cores:.1f} s"
            )
    return "\n".join(lines)


def interpreters(costs: CpuCosts, model: Model) -> str:
    """A line of Markdown for some lengths of a sequence: how long interpreters are busy, if everything is saved."""
    lines = ["| tokens | compute, s | interpreter of a rank, s | of a daemon, s |", "|---|---|---|---|"]
    for tokens in LENGTHS:
        workload = step_of_rank(replace(model, tokens=tokens), KEPT[EVERYTHING])
        own, shared = (len(workload.saved) * each for each in (costs.record, NUM_RANKS * costs.daemon_record))
        lines.append(f"| {tokens:,} | {workload.compute_seconds:.1f} | {own:.1f} | {shared:.1f} |")
    return "\n".join(lines)


def _conclusion(what: str, row: Row, computed_seconds: float, dollars_per_hour: float) -> str:
    if row.prediction is None:
        return f"* {what}: does not fit"
    slower = row.prediction.seconds / computed_seconds
    longer_dollars = (slower - 1) * dollars_per_hour * _YEAR_HOURS
    worn = (
        ""
        if row.wear is None
        else (
            f", wears out {row.wear.drives_per_year:,.0f} drives a year ({row.wear.dollars_per_year / 1e6:.2f} million "
            f"dollars; {row.wear.writes_per_day:.1f} writes a day, {row.wear.days:,.0f} days)"
        )
    )
    return (
        f"* {what}, {row.num_drives} drives: a step of {row.prediction.seconds:.1f} s, {slower:.2f} of "
        f"{computed_seconds:.1f} s; for a year's work {longer_dollars / 1e6:.2f} million dollars more{worn}"
    )


def _compute_seconds(found: Found) -> float:
    """Of a step that keeps everything and moves nothing."""
    return next(row.prediction.compute_seconds for row in found[EVERYTHING, SPECIFIED] if row.prediction is not None)


def draw(found: Found, checkpointed: Row, file: Path) -> None:
    """A panel for each choice of what is saved: the step, and how long resources are busy, by the number of drives."""
    figure = Figure(figsize=(10.5, 6.0), layout="constrained")
    computed_seconds = _compute_seconds(found)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, kept in zip(panels, (EVERYTHING, PRODUCTS), strict=True):
        _draw_panel(panel, found, kept, computed_seconds, checkpointed)
        panel.set_title(f"saved for backward: {kept}", fontsize=9)
    panels[0].set_ylabel("seconds in a step", fontsize=9)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False
    )
    figure.suptitle(_finding(found), fontsize=10)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _finding(found: Found) -> str:
    everything, products = (found[kept, SPECIFIED][-1].prediction for kept in (EVERYTHING, PRODUCTS))
    if everything is None or products is None:
        return "Computed, not measured: a step of eight H200 by the number of drives"
    return (
        f"With eight drives beside eight H200 a step takes {everything.slowdown:.2f} times as long as computing alone "
        f"if everything is stored,\n{products.slowdown:.2f} times if cheap operations are computed again "
        "(70B parameters, 131,072 tokens; computed, not measured)"
    )


def _draw_panel(panel: Axes, found: Found, kept: str, computed_seconds: float, checkpointed: Row) -> None:
    rows = [row for row in found[kept, SPECIFIED] if row.prediction is not None and row.busy is not None]
    for name, colour in _BUSY.items():
        seconds = [getattr(row.busy, name) for row in rows]
        _line(panel, rows, seconds, f"{_WORDS.get(name, name)} busy", color=colour, linewidth=1.2)
    _line(panel, rows, [row.prediction.seconds for row in rows if row.prediction], "step", color=_OURS, marker="o")
    others = [row for row in found[kept, AS_MEASURED] if row.prediction is not None]
    seconds = [row.prediction.seconds for row in others if row.prediction]
    _line(panel, others, seconds, "step, drives as others measured", color=_OURS, marker="o", linestyle=":")
    panel.axhline(computed_seconds, color=_TEXT, linewidth=0.8, linestyle="--", label="compute alone")
    if checkpointed.prediction is not None:
        seconds_again = checkpointed.prediction.seconds
        panel.axhline(seconds_again, color=_OTHERS, linewidth=1.5, linestyle="--", label="checkpointing every block")
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_xticks(list(DRIVES))
    panel.set_xlabel("drives in a host of eight accelerators", fontsize=9)
    panel.tick_params(labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _line(panel: Axes, rows: Sequence[Row], seconds: Sequence[float], label: str, **style: object) -> None:
    panel.plot([row.num_drives for row in rows], seconds, markersize=4, label=label, **style)

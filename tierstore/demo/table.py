"""The demo's result as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ..base.config import format_bytes
from .compare import DemoResult

__all__ = ["result_table", "verdict"]


def verdict(result: DemoResult) -> str:
    """The one line that says whether the gradients are the same."""
    if (difference := result.difference) is None:
        return "gradients bitwise identical: yes"
    what = "the loss" if difference.name == "loss" else f"the gradient of {difference.name}"
    return f"gradients bitwise identical: no (first at step {difference.step}: {what})"


def result_table(result: DemoResult) -> Table:
    """One table: the costs of both trainings, then what the store did."""
    steps = result.settings.steps
    table = Table(title=f"{steps} training steps on {result.plain.device}", title_justify="left")
    table.caption, table.caption_justify = "Below the line: totals of all steps, except host memory.", "left"
    table.add_column()
    table.add_column("plain", justify="right")
    table.add_column("tierstore", justify="right")
    table.add_column("ratio", justify="right")
    _add_costs(table, result)
    table.add_section()
    for name, figure in _store_rows(result.stored.stats or {}, result.host_bytes):
        table.add_row(name, "", figure, "")
    return table


def _add_costs(table: Table, result: DemoResult) -> None:
    plain, stored = result.plain, result.stored

    def add(name: str, one: float, other: float, text: Any) -> None:
        table.add_row(name, text(one), text(other), f"{other / one:.2f}" if one else "")

    if plain.peak_device_bytes is not None and stored.peak_device_bytes is not None:
        add("peak accelerator memory added", plain.peak_device_bytes, stored.peak_device_bytes, format_bytes)
    add("peak host memory added", plain.peak_host_bytes, stored.peak_host_bytes, format_bytes)
    add(
        "step time (median)",
        plain.typical_step_seconds,
        stored.typical_step_seconds,
        lambda seconds: f"{seconds:.3f} s",
    )
    table.add_row("loss at the last step", f"{plain.losses[-1]:.6f}", f"{stored.losses[-1]:.6f}", "")


def _store_rows(stats: Mapping[str, Any], host_bytes: int) -> list[tuple[str, str]]:
    """Name and figure of each row about the store; totals over all steps unless the name says otherwise."""
    stalls = [(f"stall: {cause}", f"{seconds:.2f} s") for cause, seconds in stats.get("stall_seconds", {}).items()]
    kept = sum(stats["kept_bytes"].values())
    return [
        ("host memory: budget", format_bytes(host_bytes)),
        ("host memory: most held at once", format_bytes(stats["host_bytes_peak"])),
        ("saved tensors: left in place, each save", format_bytes(kept)),
        ("saved tensors: handed to the store", format_bytes(stats["packed_bytes"])),
        ("spilled to disk", format_bytes(stats["spilled_bytes"])),
        ("written on disk for that", format_bytes(stats["written_bytes"])),
        ("restored", format_bytes(stats["restored_bytes"])),
        (
            "prefetch: in time / late / missed",
            f"{stats['prefetch_hits']} / {stats['prefetch_late']} / {stats['prefetch_misses']}",
        ),
        *stalls,
    ]

"""Memory against time, a panel for each workload, a point for each variant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, never a window

from matplotlib.figure import Figure

__all__ = ["draw"]

_OURS, _OTHERS = "#1f6f9f", "#7d8790"


def draw(found: Mapping[str, Mapping[str, Any]], device: str, file: Path) -> None:
    """Write the plot as PNG; nothing if no step was measured."""
    workloads = list(dict.fromkeys(name.partition(": ")[0] for name in found if ": " in name))
    if not workloads:
        return
    figure = Figure(figsize=(5.2 * len(workloads), 4.2), layout="constrained")
    for workload, panel in zip(workloads, figure.subplots(1, len(workloads), squeeze=False)[0], strict=True):
        for name, figures in found.items():
            if not name.startswith(f"{workload}: "):
                continue
            variant = name.partition(": ")[2]
            x, y = figures["peak_bytes"] / 2**30, figures["step_seconds"]
            panel.plot([x], [y], "o", color=_OURS if variant.startswith("tierstore") else _OTHERS)
            panel.annotate(variant, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
        panel.set_xlabel("peak of device memory (GiB)")
        panel.set_ylabel("step (s)")
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.set_title(workload, fontsize=9)
    figure.suptitle(_finding(found, workloads), fontsize=11, fontweight="bold")
    figure.supxlabel(device, fontsize=7, color="#666666")
    figure.savefig(file, dpi=110, facecolor="white", metadata={"Software": None})


def _finding(found: Mapping[str, Mapping[str, Any]], workloads: list[str]) -> str:
    """What of plain's memory the store needs, and what of its time it takes; over the workloads that have both."""
    couples = [(found.get(f"{each}: tierstore"), found.get(f"{each}: none")) for each in workloads]
    ratios = {
        name: [ours[name] / plain[name] for ours, plain in couples if ours and plain and plain[name]]
        for name in ("peak_bytes", "step_seconds")
    }
    if not ratios["peak_bytes"]:
        return "Memory and time of a step"
    memory, seconds = (f"{min(values):.2f} to {max(values):.2f}" for values in ratios.values())
    return f"With the store a step needs {memory} of plain's memory and takes {seconds} of its time"

"""Memory against time, a panel for each workload, a point for each variant."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, never a window

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

_NUM_COLUMNS = 3
_OURS, _OTHERS = "o", "X"


def draw(found: Mapping[str, Mapping[str, Any]], device: str, file: Path) -> None:
    workloads = list(dict.fromkeys(name.partition(": ")[0] for name in found if ": " in name))
    if not workloads:
        return
    num_rows = -(-len(workloads) // _NUM_COLUMNS)
    figure = Figure(figsize=(12, 3.4 * num_rows + 1.6), layout="constrained")
    panels = figure.subplots(num_rows, _NUM_COLUMNS, squeeze=False).flat
    variants = list(dict.fromkeys(name.partition(": ")[2] for name in found if ": " in name))
    colours = dict(zip(variants, itertools.cycle(matplotlib.color_sequences["tab20"]), strict=False))
    for workload, panel in itertools.zip_longest(workloads, panels):
        if workload is None:
            panel.set_axis_off()
            continue
        for variant in variants:
            figures = found.get(f"{workload}: {variant}")
            if figures is not None:
                marker = _OURS if variant.startswith("tierstore") else _OTHERS
                x, y = figures["peak_bytes"] / 2**30, figures["step_seconds"]
                panel.plot([x], [y], marker, color=colours[variant], markersize=9)
        panel.set_xlabel("peak of device memory (GiB)")
        panel.set_ylabel("step (s)")
        panel.set_xlim(left=0)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
        panel.set_title(workload, fontsize=9)
    points = [
        Line2D([], [], marker=_OURS if name.startswith("tierstore") else _OTHERS, color=colour, linestyle="none")
        for name, colour in colours.items()
    ]
    figure.legend(points, variants, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"Memory and time of a step\n{device}", fontsize=11)
    figure.savefig(file, dpi=110, facecolor="white", metadata={"Software": None})

"""Draws `bench/results/prefetch_tuning.jsonl`: what a step costs against the lookahead, a line for each order.

A row for each model, a column for each drive. Below each panel the time that was waited, for bytes in backward
(unpack) and for room in forward (pack), and the requests of a step for what was on disk: bars of those that were
answered in time (green), late (yellow), or began only when they were made (red), "reverse" to the left of "learned".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, never a window

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .harness import Benchmark, Results
from .plots import save
from .prefetch_tuning import DRIVES, LOOKAHEADS, PLAIN
from .tuning_workloads import WORKLOADS

__all__ = ["draw", "draw_policies"]

_COLOURS = {"reverse": "#c2703d", "learned": "#1f6f9f"}
_ANSWERS = {"hits": "#9fc5a2", "late": "#e3c567", "misses": "#c8553d"}
_TICKS = ("none", *LOOKAHEADS)
_BAR = 0.36
_LEGEND = (
    "Medians, with the least and the most. Bars: what backward asked for from disk; green was there in time, yellow "
    "came late, red was not begun. Left: reverse order, right: learned order."
)

Figures = Mapping[str, float]


def draw(benchmark: Benchmark, results: Results, directory: Path) -> Path | None:
    """Write `directory/NAME.png`, of the last round, of the models that ran; None if none did."""
    found = {record.variant: record.figures for record in results.records if record.figures is not None}
    if not found:
        return None
    workloads = [name for name in WORKLOADS if any(variant.startswith(f"{name}, ") for variant in found)]
    figure = Figure(figsize=(13, 4 * len(workloads)), layout="constrained")
    cells = figure.subfigures(len(workloads), len(DRIVES), squeeze=False)
    for row, workload in zip(cells, workloads, strict=True):
        for cell, drive in zip(row, DRIVES, strict=True):
            prefix = f"{workload}, {drive}: "
            policies = {name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix)}
            cell.suptitle(f"{workload}, {drive}", fontsize=9)
            draw_policies(cell.subplots(3, 1, sharex=True, height_ratios=(3, 1.3, 1)), policies)
    return save(figure, benchmark, results, directory, _LEGEND, dots_per_inch=90)


def draw_policies(panels: Sequence[Axes], policies: Mapping[str, Figures]) -> None:
    """Into panels for steps, waits and answers: the figures of each policy that there are."""
    steps, waits, answers = panels
    if PLAIN in policies:
        steps.axhline(policies[PLAIN]["step_seconds"], color="#7d8790", linestyle=":", linewidth=1, label="no store")
    for order, colour in _COLOURS.items():
        _draw_order(steps, waits, order, colour, policies)
        _draw_answers(answers, order, policies)
    steps.set_ylabel("step (s)", fontsize=8)
    waits.set_ylabel("waits (s)", fontsize=8)
    waits.set_ylim(bottom=0)
    answers.set_ylabel("in time, late,\nnot begun", fontsize=8)
    answers.set_xticks(range(len(_TICKS)), _TICKS)
    answers.set_xlabel("read ahead at most", fontsize=8)
    for panel in panels:
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=6, frameon=False, ncols=2)
        panel.tick_params(labelsize=7)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)


def _names(order: str) -> list[str]:
    """The policies of an order, from no lookahead on."""
    return ["none", *(f"{order}, {ahead}" for ahead in LOOKAHEADS)]


def _draw_order(steps: Axes, waits: Axes, order: str, colour: str, policies: Mapping[str, Figures]) -> None:
    """The step with its least and most, and the medians of what it waited for."""
    points = [(place, policies[name]) for place, name in enumerate(_names(order)) if name in policies]
    if not points:
        return
    places = [place for place, _ in points]
    middle, least, most = ([each[f"{name}step_seconds"] for _, each in points] for name in ("", "least_", "most_"))
    below = [value - low for value, low in zip(middle, least, strict=True)]
    above = [high - value for value, high in zip(middle, most, strict=True)]
    steps.errorbar(places, middle, (below, above), color=colour, marker="o", markersize=3, capsize=2, label=order)
    for cause, style in (("unpack", "-"), ("pack", "--")):
        seconds = [each[f"{cause}_waits_seconds"] for _, each in points]
        waits.plot(places, seconds, style, color=colour, linewidth=1, label=f"{order}: {cause}")


def _draw_answers(panel: Axes, order: str, policies: Mapping[str, Figures]) -> None:
    """Of each policy a bar of its requests; those of the two orders beside each other."""
    shift = _BAR / 2 * (-1 if order == "reverse" else 1)
    for place, name in enumerate(_names(order)):
        bottom = 0.0
        for answer, colour in _ANSWERS.items():
            height = policies.get(name, {}).get(answer, 0.0)
            panel.bar(place + shift, height, _BAR, bottom=bottom, color=colour)
            bottom += height

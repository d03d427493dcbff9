"""Draws the results of a benchmark as a PNG: a panel for each figure, a bar for each variant, a dot for each run; or
one figure against another, a dot for each variant."""

from __future__ import annotations

import statistics
from math import inf
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, never a window

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .goals import unit_of
from .harness import Benchmark, Results
from .report import in_short

__all__ = ["draw", "draw_panel", "draw_scatter", "figures_to_plot"]

_OURS, _OTHERS, _DOTS = "#1f6f9f", "#b9c2c9", "#333333"
_MOST_PANELS = 4


def draw(benchmark: Benchmark, results: Results, directory: Path) -> Path | None:
    """Write `directory/NAME.png`; None if the results have no figure to draw."""
    names = figures_to_plot(benchmark, results)
    if not names or not set(benchmark.scatter or ()) <= set(names):
        return None
    if benchmark.scatter is not None:
        figure = Figure(figsize=(7.0, 6.0), layout="constrained")
        draw_scatter(figure.subplots(), benchmark, results, *benchmark.scatter)
        return _save(figure, benchmark, directory)
    height_inches = 1.3 + 0.32 * len(benchmark.variants)
    figure = Figure(figsize=(3.0 + 2.6 * len(names), height_inches), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for name, panel in zip(names, panels, strict=True):
        draw_panel(panel, name, benchmark, results)
    panels[0].set_yticks(range(len(benchmark.variants)), benchmark.variants)
    panels[0].invert_yaxis()
    return _save(figure, benchmark, directory)


def _save(figure: Figure, benchmark: Benchmark, directory: Path) -> Path:
    figure.suptitle(benchmark.question, fontsize=10)
    file = directory / f"{benchmark.name}.png"
    figure.savefig(file, dpi=110, metadata={"Software": None})
    return file


def figures_to_plot(benchmark: Benchmark, results: Results) -> list[str]:
    """Those that the benchmark names, or the first few; only such as a run gave."""
    given = list(dict.fromkeys(name for record in results.records for name in record.figures or {}))
    if benchmark.plotted is None:
        return given[:_MOST_PANELS]
    return [name for name in benchmark.plotted if name in given]


def draw_panel(panel: Axes, name: str, benchmark: Benchmark, results: Results) -> None:
    """One figure: a bar for each variant's median, a dot for each run, the place of the variant as its height."""
    scale = 2**20 if unit_of(name)[1] == "MiB" else 1
    for place, variant in enumerate(benchmark.variants):
        runs = [record.figures for record in results.records if record.variant == variant and record.figures]
        values = [run[name] / scale for run in runs if name in run]
        if not values:
            panel.text(0, place, " none: see the table" if runs else " failed", va="center", fontsize=8, color=_DOTS)
            continue
        median = statistics.median(values)
        panel.barh(place, median, color=_OURS if variant.startswith("tierstore") else _OTHERS)
        panel.plot(values, [place] * len(values), ".", color=_DOTS, markersize=3)
        panel.text(max(values), place, f"  {in_short(median)}", va="center", fontsize=8)
    panel.set_xlabel(_with_unit(name), fontsize=9)
    panel.tick_params(labelsize=8)
    panel.margins(x=0.18)
    panel.set_xlim(left=min(0.0, panel.get_xlim()[0]) if _any_negative(results, name) else 0.0)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def draw_scatter(panel: Axes, benchmark: Benchmark, results: Results, across: str, up: str) -> None:
    """A dot for each variant at its medians, a line from the least to the most, and where both figures are the same.

    Variants of one process have one colour. Both axes are logarithmic; the band is 10 % either way.
    """
    lowest, highest = inf, 0.0
    for process, variants in benchmark.processes.items():
        points = [(_values(results, variant, across), _values(results, variant, up)) for variant in variants]
        points = [point for point in points if all(point)]
        if not points:
            continue
        xs, ys = ([statistics.median(values[side]) for values in points] for side in (0, 1))
        panel.plot(xs, ys, ".", markersize=9, label=process)
        color = panel.lines[-1].get_color()
        for (spread, _), y in zip(points, ys, strict=True):
            panel.plot((min(spread), max(spread)), (y, y), "-", color=color, linewidth=1)
        lowest, highest = min(lowest, *xs, *ys), max(highest, *xs, *ys)
    ends = (0.9 * lowest, 1.1 * highest)
    panel.plot(ends, ends, "-", color=_DOTS, linewidth=0.8)
    panel.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color=_OTHERS, alpha=0.3)
    panel.set(xscale="log", yscale="log", xlabel=_with_unit(across), ylabel=_with_unit(up))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    panel.legend(frameon=False)


def _values(results: Results, variant: str, name: str) -> list[float]:
    given = [record.figures for record in results.records if record.variant == variant and record.figures]
    return [figures[name] for figures in given if name in figures]


def _with_unit(name: str) -> str:
    words, unit = unit_of(name)
    return f"{words} ({unit})" if unit else words


def _any_negative(results: Results, name: str) -> bool:
    return any(record.figures.get(name, 0) < 0 for record in results.records if record.figures)

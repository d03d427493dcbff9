"""Draws the results of a benchmark as a PNG: a panel for each figure, a bar for each variant, a dot for each run; or
one figure against another, a dot for each variant.

The title is the finding (`findings.py`). The ground is white and opaque, so that a plot can be read on a dark page too.
"""

from __future__ import annotations

import statistics
import textwrap
from math import inf
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, never a window

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .findings import picture_of, title_of
from .goals import unit_of
from .harness import Benchmark, Record, Results
from .report import in_short

__all__ = ["draw", "draw_panel", "draw_scatter", "figures_to_plot", "save"]

_OURS, _OTHERS, _DOTS = "#1f6f9f", "#b9c2c9", "#333333"
_MOST_PANELS = 4
_LETTERS_PER_INCH = 10
_NOTHING = 0.002  # of the longest bar: a shorter one cannot be seen
_BARS = "Bars are medians, dots are runs."
_SCATTERED = "Dots are medians, lines go from the least to the most, the band is 10 % either way."


def draw(benchmark: Benchmark, results: Results, directory: Path) -> Path | None:
    """Write `directory/NAME.png`; None if the results have no figure to draw."""
    names = figures_to_plot(benchmark, results)
    if not names or not set(benchmark.scatter or ()) <= set(names):
        return None
    if benchmark.scatter is not None:
        figure = Figure(figsize=(7.0, 6.0), layout="constrained")
        draw_scatter(figure.subplots(), benchmark, results, *benchmark.scatter)
        return save(figure, benchmark, results, directory, _SCATTERED)
    variants = _variants_with_bars(benchmark)
    height_inches = 1.5 + 0.32 * len(variants)
    figure = Figure(figsize=(3.0 + 2.6 * len(names), height_inches), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for name, panel in zip(names, panels, strict=True):
        draw_panel(panel, name, benchmark, results)
    panels[0].set_yticks(range(len(variants)), variants)
    panels[0].set_ylim(len(variants) - 0.4, -0.6)  # the first on top, with room for one that has no bar
    return save(figure, benchmark, results, directory, _BARS)


def save(
    figure: Figure, benchmark: Benchmark, results: Results, directory: Path, legend: str, dots_per_inch: int = 110
) -> Path:
    """Write `directory/NAME.png` with the finding as title; below, the machine and what the marks are; returns it."""
    width = int(_LETTERS_PER_INCH * figure.get_figwidth())
    figure.suptitle(textwrap.fill(title_of(benchmark, results), width), fontsize=11, fontweight="bold")
    below = f"{_machine(results)}{legend}"
    figure.supxlabel(textwrap.fill(below, int(1.6 * width)), fontsize=7, color="#666666")
    file = directory / f"{benchmark.name}.png"
    figure.savefig(file, dpi=dots_per_inch, facecolor="white", metadata={"Software": None})
    return file


def _machine(results: Results) -> str:
    machine = results.machine
    if not machine:
        return ""
    memory_gib = machine["memory_bytes"] / 2**30
    return f"{machine['cpu']}, {machine['cores']} cores, {memory_gib:.0f} GiB of memory, {machine['disk']}. "


def figures_to_plot(benchmark: Benchmark, results: Results) -> list[str]:
    """Those that the benchmark names, or the first few; only such as a run gave."""
    given = list(dict.fromkeys(name for record in results.records for name in record.figures or {}))
    if benchmark.plotted is None:
        return given[:_MOST_PANELS]
    return [name for name in benchmark.plotted if name in given]


def _variants_with_bars(benchmark: Benchmark) -> list[str]:
    """What was concluded from all of them has figures of its own."""
    return [variant for variant in benchmark.variants if variant not in benchmark.concluded]


def draw_panel(panel: Axes, name: str, benchmark: Benchmark, results: Results) -> None:
    """One figure: a bar for each variant's median, a dot for each run, the place of the variant as its height."""
    scale = 2**20 if unit_of(name)[1] == "MiB" else 1
    picture = picture_of(benchmark)
    variants = _variants_with_bars(benchmark)
    shown = [[value / scale for value in _values(results, variant, name)] for variant in variants]
    longest = max((abs(value) for values in shown for value in values), default=0.0)
    for place, (variant, values) in enumerate(zip(variants, shown, strict=True)):
        records = [record for record in results.records if record.variant == variant]
        if not values:
            panel.text(0, place, f" {_why_none(records)}", va="center", fontsize=8, color=_DOTS)
            continue
        median = statistics.median(values)
        panel.barh(place, median, color=_OURS if picture.ours(variant) else _OTHERS)
        panel.plot(values, [place] * len(values), ".", color=_DOTS, markersize=3)
        words = in_short(median) if abs(median) > _NOTHING * longest else "0"
        words += ", killed" if _is_killed(records) else ""
        panel.text(max(values), place, f"  {words}", va="center", fontsize=8)
    panel.set_xlabel(_axis(benchmark, name), fontsize=9)
    panel.tick_params(labelsize=8)
    panel.margins(x=0.18)
    lowest = min((value for values in shown for value in values), default=0.0)
    panel.set_xlim(left=1.1 * lowest if lowest < -_NOTHING * longest else 0.0, right=None if longest else 1.0)
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
    panel.set(xscale="log", yscale="log", xlabel=_axis(benchmark, across), ylabel=_axis(benchmark, up))
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    panel.legend(frameon=False)


def _values(results: Results, variant: str, name: str) -> list[float]:
    given = [record.figures for record in results.records if record.variant == variant and record.figures]
    return [figures[name] for figures in given if name in figures]


def _why_none(records: list[Record]) -> str:
    """In words, why a variant has no such figure."""
    if _is_killed(records):
        return "killed: out of memory"
    if not records:
        return "not run"
    return "not measured" if any(record.figures for record in records) else "failed"


def _is_killed(records: list[Record]) -> bool:
    return any((record.figures or {}).get("out_of_memory_kills") for record in records)


def _axis(benchmark: Benchmark, name: str) -> str:
    words, unit = unit_of(name)
    return picture_of(benchmark).axes.get(name) or (f"{words} ({unit})" if unit else words)

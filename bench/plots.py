"""Draws the results of a benchmark as a PNG: a panel for each figure, a bar for each variant, a dot for each run."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, never a window

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .goals import unit_of
from .harness import Benchmark, Results

__all__ = ["draw", "figures_to_plot"]

_OURS, _OTHERS, _DOTS = "#1f6f9f", "#b9c2c9", "#333333"
_MOST_PANELS = 4


def draw(benchmark: Benchmark, results: Results, directory: Path) -> Path | None:
    """Write `directory/NAME.png`; None if the results have no figure to draw."""
    names = figures_to_plot(benchmark, results)
    if not names:
        return None
    height_inches = 1.3 + 0.32 * len(benchmark.variants)
    figure = Figure(figsize=(3.0 + 2.6 * len(names), height_inches), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for name, panel in zip(names, panels, strict=True):
        _draw_panel(panel, name, benchmark, results)
    panels[0].set_yticks(range(len(benchmark.variants)), benchmark.variants)
    panels[0].invert_yaxis()
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


def _draw_panel(panel: Axes, name: str, benchmark: Benchmark, results: Results) -> None:
    words, unit = unit_of(name)
    scale = 2**20 if unit == "MiB" else 1
    for place, variant in enumerate(benchmark.variants):
        runs = [record.figures for record in results.records if record.variant == variant and record.figures]
        values = [run[name] / scale for run in runs if name in run]
        if not values:
            panel.text(0, place, " none: see the table" if runs else " failed", va="center", fontsize=8, color=_DOTS)
            continue
        median = statistics.median(values)
        panel.barh(place, median, color=_OURS if variant.startswith("tierstore") else _OTHERS)
        panel.plot(values, [place] * len(values), ".", color=_DOTS, markersize=3)
        panel.text(max(values), place, f"  {median:.3g}", va="center", fontsize=8)
    panel.set_xlabel(f"{words} ({unit})" if unit else words, fontsize=9)
    panel.tick_params(labelsize=8)
    panel.margins(x=0.18)
    panel.set_xlim(left=min(0.0, panel.get_xlim()[0]) if _any_negative(results, name) else 0.0)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _any_negative(results: Results, name: str) -> bool:
    return any(record.figures.get(name, 0) < 0 for record in results.records if record.figures)

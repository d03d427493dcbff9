"""Draws the results of a benchmark: a panel for each figure, a bar for each variant's median, a dot for each run. The
ground is white and opaque, so that a plot can be read on a dark page too."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib
import pandas

matplotlib.use("Agg")  # a file, never a window

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .harness import Benchmark, Results
from .report import frame_of, in_short, in_words, machine_of

_BARS, _DOTS = "#7ba7c2", "#333333"
_MOST_PANELS = 4
_LETTERS_PER_INCH = 10


def draw(benchmark: Benchmark, results: Results, directory: Path) -> None:
    """Write `directory/NAME.png`, with the question as title; nothing if the results have no figure to draw."""
    frame = frame_of(results)
    variants = [variant for variant in benchmark.variants if variant not in benchmark.concluded]
    frame = frame[frame.index.isin(variants)]
    names = [name for name in benchmark.plotted or frame.columns[:_MOST_PANELS] if name in frame]
    if not names:
        return
    drawn = frame.index[frame[names].notna().any(axis="columns")]
    variants = [variant for variant in variants if variant in drawn]
    figure = Figure(figsize=(3.0 + 2.6 * len(names), 1.5 + 0.32 * len(variants)), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for name, panel in zip(names, panels, strict=True):
        draw_panel(panel, name, variants, frame)
    panels[0].set_ylim(len(variants) - 0.4, -0.6)  # the first on top
    width = int(_LETTERS_PER_INCH * figure.get_figwidth())
    figure.suptitle(textwrap.fill(benchmark.question, width), fontsize=11, fontweight="bold")
    below = f"{machine_of(results)}. Bars are medians, dots are runs."
    figure.supxlabel(textwrap.fill(below, int(1.6 * width)), fontsize=7, color="#666666")
    figure.savefig(directory / f"{benchmark.name}.png", dpi=110, facecolor="white", metadata={"Software": None})


def draw_panel(panel: Axes, name: str, variants: list[str], frame: pandas.DataFrame) -> None:
    values = frame[name].dropna()
    medians = values.groupby(level=0).median().reindex(variants)
    killed = set(frame.index[frame.get("out_of_memory_kills", pandas.Series(0, frame.index)) > 0])
    bars = panel.barh(range(len(variants)), medians.fillna(0), color=_BARS)
    panel.plot(values, [variants.index(variant) for variant in values.index], ".", color=_DOTS, markersize=3)
    words = ["killed" if each in killed else in_short(medians[each]) for each in variants]
    panel.bar_label(bars, words, padding=6, fontsize=8)
    panel.set_yticks(range(len(variants)), variants)
    panel.set_xlabel(in_words(name), fontsize=9)
    panel.tick_params(labelsize=8)
    panel.margins(x=0.18)
    panel.spines[["top", "right"]].set_visible(False)

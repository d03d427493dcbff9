"""One step as a picture. Needs matplotlib, which is no dependency of this package."""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.config import format_bytes
from ..errors import ConfigError
from .causes import CAUSES
from .summary import StepSummary
from .timeline import COLOURS, TIERS, Curve, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_picture"]

_WIDTH_INCHES = 15.0
_ROW_INCHES = 0.2
_CHART_INCHES = 1.3
_LEAST_SHARE = 0.0005  # of the picture's width: thinner boxes would not be seen
_THREAD_ROWS = 2.4


def draw_picture(timeline: Timeline, summary: StepSummary, num_steps: int, file: Path) -> None:
    """Write the picture; its format is that of the file's suffix.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the suffix.
        OSError: the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--png", str(file), "matplotlib is not installed (pip install matplotlib); --html needs none")
    from matplotlib.figure import Figure

    host = [curve for curve in timeline.curves if curve.field not in ("disk_bytes", "device_bytes")]
    charts = ([host] if host else []) + [[curve] for curve in timeline.curves if curve not in host]
    tall = _ROW_INCHES * sum(_THREAD_ROWS if lane.group == "compute" else 1 for lane in timeline.lanes)
    figure = Figure(figsize=(_WIDTH_INCHES, 1.9 + tall + _CHART_INCHES * len(charts)), layout="constrained")
    all_axes = figure.subplots(
        1 + len(charts), 1, sharex=True, squeeze=False, height_ratios=[tall, *[_CHART_INCHES] * len(charts)]
    )[:, 0]
    _draw_lanes(all_axes[0], timeline)
    for axes, curves in zip(all_axes[1:], charts, strict=True):
        _draw_curves(axes, curves, timeline)
    all_axes[-1].set_xlabel("seconds")
    headline = "\n".join(line for text in summary.headline for line in textwrap.wrap(text, 130))
    figure.suptitle(f"Step {summary.number} of {num_steps}\n{headline}", x=0.01, ha="left", fontsize=13, weight="bold")
    try:
        figure.savefig(file, dpi=110)
    except ValueError as error:
        raise ConfigError("--png", str(file), str(error)) from error


def _draw_lanes(axes: Axes, timeline: Timeline) -> None:
    y, ticks = 0.0, []
    for lane in timeline.lanes:
        rows = _THREAD_ROWS if lane.group == "compute" else 1.0
        least = _LEAST_SHARE * (timeline.ended_ns - timeline.began_ns)
        for kind in dict.fromkeys(box.kind for box in lane.boxes):
            spans = [
                (_seconds(box.began_ns, timeline), max(box.ended_ns - box.began_ns, least) / 1e9)
                for box in lane.boxes
                if box.kind == kind
            ]
            axes.broken_barh(spans, (y, rows * 0.9), facecolors=COLOURS[kind], linewidth=0)
        ticks.append((y + rows * 0.45, f"{lane.group} · {lane.name}"))
        y += rows
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.set_ylim(max(y, 1.0), 0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    kinds = {box.kind for lane in timeline.lanes for box in lane.boxes}
    entries = [(CAUSES.get(kind, kind), COLOURS[kind]) for kind in COLOURS if kind in kinds]  # type: ignore[call-overload]
    _legend(axes, entries)


def _draw_curves(axes: Axes, curves: list[Curve], timeline: Timeline) -> None:
    times = [_seconds(at_ns, timeline) for at_ns in curves[0].times_ns]
    colours = [TIERS[curve.field][1] for curve in curves]
    axes.stackplot(times, *[curve.nbytes for curve in curves], colors=colours, step="post")
    most = max(map(sum, zip(*[curve.nbytes for curve in curves], strict=True)))
    axes.set_yticks([0, most], ["0", format_bytes(most)], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes, [(curve.name, TIERS[curve.field][1]) for curve in curves])


def _legend(axes: Axes, entries: list[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    patches: list[Any] = [Patch(color=colour, label=text) for text, colour in entries]
    axes.legend(handles=patches, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


def _seconds(at_ns: int, timeline: Timeline) -> float:
    return (at_ns - timeline.began_ns) / 1e9

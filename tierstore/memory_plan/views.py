"""A plan as a table and as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..base.config import format_bytes
from ..errors import ConfigError
from .contents import BlockPlan, Contents
from .decision import Prices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 80
_NUM_POINTS = 9


def plan_text(contents: Contents) -> str:
    """The plan in at most 80 columns."""
    lines = [Text(f"Plan for {format_bytes(contents.limit_bytes)} of {contents.tier}")]
    if not contents.is_needed:
        lines.append(Text("It fits: nothing to do."))
    parts: list[Text | Table] = [*lines, Text(), _strategies(contents)]
    if contents.is_needed:
        parts += [Text(), _blocks(contents.blocks)]
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None).print(Group(*parts, *_remarks(contents)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _remarks(contents: Contents) -> list[Text]:
    remarks = []
    if contents.staging_bytes:
        remarks.append(Text(f"The store moves at most {format_bytes(contents.staging_bytes)} at a time meanwhile."))
    names: dict[str, list[str]] = {}
    for block in contents.blocks:
        if block.differs:
            names.setdefault(block.differs, []).append(block.name or "the model")
    remarks += (Text(f"Never recomputed, as {reason}: {', '.join(several)}.") for reason, several in names.items())
    return remarks


def _strategies(contents: Contents) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for heading in ("peak", "step", "fits"):
        table.add_column(heading, justify="right")
    for name, predicted in {"this plan": contents.predicted, **contents.strategies}.items():
        cells = format_bytes(predicted.peak_bytes), f"{predicted.step_seconds:.3g} s"
        table.add_row(name, *cells, "yes" if predicted.peak_bytes <= contents.limit_bytes else "no")
    return table


def _blocks(blocks: Sequence[BlockPlan]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("block", overflow="fold")
    table.add_column("module", overflow="fold")
    table.add_column("what is done", overflow="fold")
    for heading in ("saves", "keeps", "stores"):
        table.add_column(heading, justify="right", no_wrap=True)
    for _, group in groupby(blocks, key=lambda block: (block.module, block.as_action())):
        alike = list(group)
        first, last = alike[0], alike[-1]
        name = (first.name or "(the model)") if first is last else f"{first.name} … {last.name}"
        sizes = (
            sum(block.saved_bytes for block in alike),
            sum(block.kept_bytes for block in alike),
            sum(block.stored_bytes for block in alike),
        )
        table.add_row(name, first.module, _what(first), *(format_bytes(size) if size else "-" for size in sizes))
    return table


def _what(block: BlockPlan) -> str:
    if block.action != "recompute":
        return block.action
    held = f", hold {len(block.held)} outputs" if block.held else ""
    return f"recompute{held}" + (" in the store" if block.held and block.stores else ", store inputs" * block.stores)


def draw_plan(contents: Contents, prices: Prices) -> Figure:
    """See `MemoryPlan.plot`."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plot", "a figure", "matplotlib is not installed (pip install matplotlib)")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    points = _curve(contents, prices)
    (curve,) = axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label="plan, by its limit")
    right = max(contents.limit_bytes, *(each.peak_bytes for each in contents.strategies.values())) / 2**30 * 1.05
    for name, predicted in contents.strategies.items():  # the same step within any limit that it fits into
        axes.plot([predicted.peak_bytes / 2**30, right], [predicted.step_seconds] * 2, "o-", markevery=[0], label=name)
    own = contents.predicted
    axes.plot([own.peak_bytes / 2**30], [own.step_seconds], "D", color=curve.get_color(), label="this plan")
    axes.axvline(contents.limit_bytes / 2**30, color="grey", linestyle=":", label="limit")
    axes.set_xlabel(f"limit: {contents.tier} (GiB)")
    axes.set_ylabel("step (seconds)")
    axes.set_title(
        f"This plan: {own.step_seconds:.3g} s a step within {format_bytes(contents.limit_bytes)}", loc="left"
    )
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def _curve(contents: Contents, prices: Prices) -> list[tuple[float, float]]:
    least = prices.decide(None, is_narrow=True)
    if least is None:
        return []
    most_bytes = contents.strategies["keep everything"].peak_bytes
    points = []
    for place in range(_NUM_POINTS):
        limit_bytes = least.peak_bytes + (most_bytes - least.peak_bytes) * place // (_NUM_POINTS - 1)
        for is_narrow in (False, True):
            decision = prices.decide(limit_bytes, is_narrow=is_narrow)
            if decision is not None:
                points.append((limit_bytes / 2**30, decision.step_seconds))
                break
    return points

"""What a plan consists of, as a file has it; and its table and its picture."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from ..base.config import format_bytes
from ..errors import ConfigError
from .decision import Action, BlockPlan, Option, Prices
from .prices import TriedDecision

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 2
_WIDTH = 80
_NUM_POINTS = 9


class Predicted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most memory that a step needs, and the seconds of its forward and backward."""

    peak_bytes: int
    step_seconds: float


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan as a file has it. `min_bytes`: smaller tensors are not stored. `tier`: what is limited, in words.
    `num_calls`: of the model in a step. `staging_bytes`: of the store's window meanwhile; 0: as it was opened."""

    format: int
    limit_bytes: int
    min_bytes: int
    tier: str
    predicted: Predicted
    strategies: dict[str, Predicted]
    blocks: tuple[BlockPlan, ...]
    num_calls: int = 1
    staging_bytes: int = 0

    @property
    def is_needed(self) -> bool:
        return any(block.action != "keep" for block in self.blocks)


def contents_of(choice: TriedDecision, prices: Prices, limit_bytes: int, reserve_bytes: int, tier: str) -> Contents:
    """The contents of the plan of a choice."""
    strategies = {
        "keep everything": prices.uniform(Action("keep")),
        "store everything": prices.uniform(Action("store")),
        "recompute every block": prices.uniform(Action("recompute")),
    }
    return Contents(
        FORMAT,
        limit_bytes,
        prices.min_bytes,
        tier,
        Predicted(choice.measured.peak_bytes + reserve_bytes, choice.measured.seconds),
        {name: Predicted(each.peak_bytes + reserve_bytes, each.step_seconds) for name, each in strategies.items()},
        tuple(_block(name, option, prices) for name, option in choice.decision.chosen.items()),
        prices.num_calls,
        choice.decision.staging_bytes or 0,
    )


def _block(name: str, option: Option, prices: Prices) -> BlockPlan:
    saved = next(other.kept for other in prices.options[name] if other.action == Action("keep"))
    return replace(
        prices.blocks[name],
        action=option.action.kind,
        stores=option.action.stores,
        held=option.action.held,
        saved_bytes=sum(saved.values()),
        kept_bytes=sum(option.kept.values()),
        stored_bytes=sum(option.stored.values()),
    )


def plan_text(contents: Contents) -> str:
    """The plan in at most 80 columns."""
    parts: list[str | Table] = [f"Plan for {format_bytes(contents.limit_bytes)} of {contents.tier}"]
    if contents.is_needed:
        parts += ["", _strategies(contents), "", _blocks(contents.blocks)]
    else:
        parts += ["It fits: nothing to do.", "", _strategies(contents)]
    out = io.StringIO()
    console = Console(file=out, width=_WIDTH, color_system=None, markup=False, highlight=False)
    console.print(*parts, *_remarks(contents), sep="\n")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _remarks(contents: Contents) -> Iterator[str]:
    if contents.staging_bytes:
        yield f"The store moves at most {format_bytes(contents.staging_bytes)} at a time meanwhile."
    names: dict[str, list[str]] = {}
    for block in contents.blocks:
        if block.differs:
            names.setdefault(block.differs, []).append(block.name or "the model")
    for reason, several in names.items():
        yield f"Never recomputed, as {reason}: {', '.join(several)}."


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in left:
        table.add_column(heading, overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _strategies(contents: Contents) -> Table:
    table = _table([""], ["peak", "step", "fits"])
    for name, predicted in {"this plan": contents.predicted, **contents.strategies}.items():
        cells = format_bytes(predicted.peak_bytes), f"{predicted.step_seconds:.3g} s"
        table.add_row(name, *cells, "yes" if predicted.peak_bytes <= contents.limit_bytes else "no")
    return table


def _blocks(blocks: Sequence[BlockPlan]) -> Table:
    table = _table(["block", "module", "what is done"], ["saves", "keeps", "stores"])
    for _, group in groupby(blocks, key=lambda block: (block.module, block.as_action())):
        alike = list(group)
        first, last = alike[0], alike[-1]
        name = (first.name or "(the model)") if first is last else f"{first.name} … {last.name}"
        sizes = (
            sum(block.saved_bytes for block in alike),
            sum(block.kept_bytes for block in alike),
            sum(block.stored_bytes for block in alike),
        )
        table.add_row(
            name, first.module, str(first.as_action()), *(format_bytes(size) if size else "-" for size in sizes)
        )
    return table


def draw_plan(contents: Contents, prices: Prices) -> Figure:
    """Draw what `MemoryPlan.plot` describes."""
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
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def _curve(contents: Contents, prices: Prices) -> list[tuple[float, float]]:
    least = prices.narrow().decide(None)
    if least is None:
        return []
    most_bytes = contents.strategies["keep everything"].peak_bytes
    points = []
    for place in range(_NUM_POINTS):
        limit_bytes = least.peak_bytes + (most_bytes - least.peak_bytes) * place // (_NUM_POINTS - 1)
        decision = prices.decide(limit_bytes) or prices.narrow().decide(limit_bytes)
        if decision is not None:
            points.append((limit_bytes / 2**30, decision.step_seconds))
    return points

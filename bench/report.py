"""What the runs showed: one table for each benchmark, and one of all goals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from .goals import Verdict, figures_by_round, judge, unit_of
from .harness import Benchmark, Figures, Results

__all__ = ["goals_as_markdown", "in_short", "show", "show_goals", "time_taken", "verdicts_of"]

_STYLES = {"met": "green", "missed": "red", "not measured": "yellow"}


def verdicts_of(benchmark: Benchmark, results: Results | None) -> list[Verdict]:
    """Each goal of a benchmark, judged; nothing was measured where there are no results."""
    runs = [(r.round, r.variant, r.figures) for r in results.records] if results else []
    return [judge(goal, figures_by_round(runs)) for goal in benchmark.goals]


def show(benchmark: Benchmark, results: Results, console: Console) -> None:
    """Print each figure's median, how it stands to the first variant's, and its spread; failures by themselves."""
    by_variant = {
        variant: [r.figures for r in results.records if r.variant == variant and r.figures is not None]
        for variant in benchmark.variants
    }
    names = list(dict.fromkeys(name for runs in by_variant.values() for run in runs for name in run))
    baseline = by_variant[benchmark.variants[0]]
    beside = "" if benchmark.compare == "none" else ", beside the first"
    table = Table(title=benchmark.question, caption=f"median{beside}; least to most", show_lines=True)
    headings = ["\n".join(filter(None, unit_of(name))) for name in names]
    rows = [[_cell(name, runs, baseline, benchmark.compare) for name in names] for runs in by_variant.values()]
    across, down = headings, list(by_variant)
    if len(across) > len(down):
        across, down, rows = down, headings, [list(row) for row in zip(*rows, strict=True)]
    table.add_column(min_width=12)
    for heading in across:
        table.add_column(heading, justify="right")
    for heading, row in zip(down, rows, strict=True):
        table.add_row(heading.replace("\n", ", ") if down is headings else heading, *row)
    console.print(table)
    for record in results.records:
        if record.failure is not None:
            text = f"{record.variant}, round {record.round}: {record.failure}"
            console.print(text, style="red", markup=False, highlight=False)


def _cell(name: str, runs: Sequence[Figures], baseline: Sequence[Figures], compare: str) -> str:
    if not runs:
        return "failed"
    values = [run[name] for run in runs if name in run]
    if not values:
        return "-"
    scale = 2**20 if unit_of(name)[1] == "MiB" else 1
    median = statistics.median(values)
    text = in_short(median / scale)
    firsts = [run[name] for run in baseline if name in run]
    if firsts and runs is not baseline and compare != "none":
        first = statistics.median(firsts)
        if compare == "difference":
            text += f" {(median - first) / scale:+.1f}"
        elif first:
            text += f" x{median / first:.2f}"
    if len(values) > 1 and min(values) != max(values):
        text += f"\n{in_short(min(values) / scale)} to {in_short(max(values) / scale)}"
    return text


def in_short(value: float) -> str:
    """Three digits, or all those before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def show_goals(verdicts: Mapping[str, Sequence[Verdict]], console: Console) -> None:
    """Print every goal of the benchmarks named: what was asked, what was measured, and whether that is enough."""
    table = Table(title="All goals", caption="median of the rounds' ratios; least to most", show_lines=True)
    for heading in ("benchmark", "goal", "asked", "measured", ""):
        table.add_column(heading)
    for name, judged in verdicts.items():
        for verdict in judged:
            style = _STYLES[verdict.outcome]
            table.add_row(name, *_words(verdict), f"[{style}]{verdict.outcome}[/]")
    console.print(table)


def goals_as_markdown(verdicts: Mapping[str, Sequence[Verdict]], results: Mapping[str, Results | None]) -> str:
    """The same as a page, with the machine that it was measured on."""
    lines = [
        "# Goals",
        "",
        *_machines(results),
        "",
        *([taken, ""] if (taken := time_taken(results)) else []),
        "| benchmark | goal | asked | measured | |",
        "|---|---|---|---|---|",
    ]
    for name, judged in verdicts.items():
        lines += [f"| {' | '.join((name, *_words(verdict), verdict.outcome))} |" for verdict in judged]
    return "\n".join(lines) + "\n"


def time_taken(results: Mapping[str, Results | None]) -> str:
    """How long the runs of each benchmark took, the longest first, in a line; "" where that was not noted."""
    noted = {
        name: [record.seconds for record in found.records if record.seconds is not None]
        for name, found in results.items()
        if found is not None
    }
    seconds = {name: sum(runs) for name, runs in noted.items() if runs}
    if not seconds:
        return ""
    each = ", ".join(f"{name} {taken:.0f} s" for name, taken in sorted(seconds.items(), key=lambda item: -item[1]))
    return f"The runs took {sum(seconds.values()) / 60:.1f} minutes: {each}."


def _words(verdict: Verdict) -> tuple[str, str, str]:
    goal = verdict.goal
    return f"{goal.what} ({goal.variant})", goal.asked, verdict.measured


def _machines(results: Mapping[str, Results | None]) -> list[str]:
    """In plain words; one line, or, where the files come from several machines, an item for each and what ran there."""
    found: dict[str, list[str]] = {}
    for name, each in results.items():
        if each is not None:
            machine, versions = each.machine, each.versions
            gibibytes = machine["memory_bytes"] / 2**30
            words = f"{machine['cpu']}, {machine['cores']} cores, {gibibytes:.0f} GiB of memory, {machine['disk']}, "
            words += f"{machine['file_system']}; Linux {versions['linux']}, Python {versions['python']}, "
            found.setdefault(f"{words}torch {versions['torch']}", []).append(name)
    if len(found) < 2:
        return [f"{words}." for words in found]
    return [f"* {words}: {', '.join(names)}." for words, names in found.items()]

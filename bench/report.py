"""What the runs showed: a table of figures for each benchmark, and a page of all goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas

from .goals import Verdict, judge, unit_of
from .harness import Benchmark, Figures, Results


def frame_of(results: Results) -> pandas.DataFrame:
    """A row for each run that has figures, by variant; a column for each figure, bytes in MiB."""
    runs = [record for record in results.records if record.figures is not None]
    frame = pandas.DataFrame([run.figures for run in runs], index=[run.variant for run in runs], dtype=float)
    return frame / [unit_of(name).scale for name in frame.columns]


def in_words(figure: str) -> str:
    words, unit, _ = unit_of(figure)
    return f"{words} ({unit})" if unit else words


def in_short(value: float) -> str:
    return "-" if pandas.isna(value) else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table_of(benchmark: Benchmark, results: Results) -> str:
    """The median of each figure of each variant, with the least and the most of its runs; failures below."""
    runs = frame_of(results).groupby(level=0)
    median, least, most = (each.map(in_short) for each in (runs.median(), runs.min(), runs.max()))
    cells = median.where(least == most, median + " (" + least + " to " + most + ")")
    cells = cells.reindex([variant for variant in benchmark.variants if variant in cells.index])
    cells.columns = [in_words(name) for name in cells.columns]
    if len(cells.columns) > len(cells):
        cells = cells.T
    failures = [
        f"{record.variant}, round {record.round}: {record.failure}"
        for record in results.records
        if record.failure is not None
    ]
    return "\n".join([f"{benchmark.name}: {benchmark.question}", cells.to_string(line_width=140), *failures, ""])


def verdicts_of(benchmark: Benchmark, results: Results | None) -> list[Verdict]:
    rounds: dict[int, dict[str, Figures]] = {}
    for run in results.records if results else ():
        if run.figures is not None:
            rounds.setdefault(run.round, {}).setdefault(run.variant, {}).update(run.figures)
    return [judge(goal, rounds) for goal in benchmark.goals]


def goals_as_markdown(verdicts: Mapping[str, Sequence[Verdict]], results: Mapping[str, Results | None]) -> str:
    """A page: machines, what was asked, what was measured, and whether that is enough."""
    lines = ["# Goals", "", *_machines(results), ""]
    lines += [taken, ""] if (taken := time_taken(results)) else []
    lines += ["| benchmark | goal | asked | measured | |", "|---|---|---|---|---|"]
    for name, judged in verdicts.items():
        for each in judged:
            words = (name, f"{each.goal.what} ({each.goal.variant})", each.goal.asked, each.measured, each.in_words)
            lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def time_taken(results: Mapping[str, Results | None]) -> str:
    """How long the runs of each benchmark took, the longest first, in a line; "" where that was not noted."""
    noted = {name: [r.seconds for r in found.records if r.seconds] for name, found in results.items() if found}
    seconds = {name: sum(runs) for name, runs in noted.items() if runs}
    if not seconds:
        return ""
    each = ", ".join(f"{name} {taken:.0f} s" for name, taken in sorted(seconds.items(), key=lambda item: -item[1]))
    return f"The runs took {sum(seconds.values()) / 60:.1f} minutes: {each}."


def machine_of(results: Results) -> str:
    if not (machine := results.machine):
        return ""
    memory_gib = machine["memory_bytes"] / 2**30
    return f"{machine['cpu']}, {machine['cores']} cores, {memory_gib:.0f} GiB of memory, {machine['disk']}"


def _machines(results: Mapping[str, Results | None]) -> list[str]:
    found: dict[str, list[str]] = {}
    for name, each in results.items():
        if each is not None:
            versions = each.versions
            words = f"{machine_of(each)}, {each.machine['file_system']}; Linux {versions['linux']}, "
            words += f"Python {versions['python']}, torch {versions['torch']}"
            found.setdefault(words, []).append(name)
    if len(found) < 2:
        return [f"{words}." for words in found]
    return [f"* {words}: {', '.join(names)}." for words, names in found.items()]

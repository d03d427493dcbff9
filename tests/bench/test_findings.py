"""The plots: a title that says the finding, plain words under the axes, and what is said of a variant without a bar."""

from __future__ import annotations

import dataclasses
import re

import pytest
from matplotlib.figure import Figure

import bench.__main__ as command
from bench.findings import PICTURES, Medians, title_of
from bench.harness import RESULTS, Record, Results, read_results
from bench.plots import draw_panel, figures_to_plot
from tests.bench.toy import BENCHMARK as TOY

FOLDERS = (RESULTS, *(path for path in RESULTS.iterdir() if path.is_dir()))
RECORDED = [(folder, file.stem) for folder in FOLDERS for file in sorted(folder.glob("*.jsonl"))]


def panel_of(records: list[Record], figure: str = "size_bytes") -> dict[str, str]:
    """What a panel says beside each variant."""
    panel = Figure().subplots()
    draw_panel(panel, figure, TOY, Results(records, {}, {}))
    return {TOY.variants[int(text.get_position()[1])]: text.get_text().strip() for text in panel.texts}


def test_pictures_are_of_benchmarks() -> None:
    assert set(PICTURES) <= set(command.NAMES)


@pytest.mark.parametrize(("folder", "name"), RECORDED, ids=[f"{folder.name}-{name}" for folder, name in RECORDED])
def test_title_is_a_finding_with_its_figure(folder: object, name: str) -> None:
    benchmark, results = command.load(name), read_results(name, folder)  # type: ignore[arg-type]
    title = title_of(benchmark, results)
    if {record.variant for record in results.records} >= set(benchmark.variants):
        assert title != benchmark.question
    assert re.search(r"\d", title)
    assert not re.search(r"\d\.\d{3}|nan|inf\b", title), "a figure nobody can read"
    assert len(title) <= 140


@pytest.mark.parametrize(("folder", "name"), RECORDED, ids=[f"{folder.name}-{name}" for folder, name in RECORDED])
def test_words_under_an_axis_are_of_figures_that_are_drawn(folder: object, name: str) -> None:
    benchmark, results = command.load(name), read_results(name, folder)  # type: ignore[arg-type]
    drawn = set(figures_to_plot(benchmark, results))
    if {record.variant for record in results.records} >= set(benchmark.variants):
        assert PICTURES[name].axes.keys() <= drawn
    bare = {figure for figure in drawn - PICTURES[name].axes.keys() if re.search("_to_|_of_|ratio|percent", figure)}
    assert bare == set() or PICTURES[name].axes == {}, "a ratio needs words"


def test_title_without_what_it_needs_is_the_question() -> None:
    benchmark = command.load("memory_limit")
    assert title_of(benchmark, Results([Record("unlimited", 1, {"step_seconds": 1.0})], {}, {})) == benchmark.question


def test_medians_are_of_runs_with_the_figure_and_of_the_same_rounds() -> None:
    records = [Record("a", number, {"step_seconds": value}) for number, value in enumerate((1.0, 9.0, 2.0))]
    run = Medians(Results([*records, Record("a", 4, None, "it failed"), Record("b", 2, {"step_seconds": 4.0})], {}, {}))
    assert (run.of("a", "step_seconds"), run.ratio("step_seconds", "b", "a")) == (2.0, 2.0)
    assert run.beyond("step_seconds", "b", "a") == 2.0
    assert sorted(run.all("step_seconds")) == [2.0, 4.0]
    assert run.all("step_seconds", lambda variant: variant == "b") == [4.0]
    with pytest.raises(LookupError):
        run.all("size_bytes")


def test_panel_says_killed_of_what_the_kernel_killed() -> None:
    said = panel_of(
        [
            Record("one", 1, {"size_bytes": 2.0**20}),
            Record("two", 1, {"out_of_memory_kills": 1}),
            Record("broken", 1, {"size_bytes": 2.0**20, "out_of_memory_kills": 1}),
        ]
    )
    assert said == {"one": "1", "two": "killed: out of memory", "broken": "1, killed"}


def test_panel_says_why_there_is_no_bar() -> None:
    records = [Record("one", 1, {"width_seconds": 1.0}), Record("broken", 1, None, "exit code 1")]
    assert panel_of(records) == {"one": "not measured", "two": "not run", "broken": "failed"}


def test_panel_says_0_of_what_cannot_be_seen() -> None:
    said = panel_of(
        [Record("one", 1, {"width_seconds": 0.5}), Record("two", 1, {"width_seconds": -0.000547})], "width_seconds"
    )
    assert (said["one"], said["two"]) == ("0.5", "0")


def test_ours_are_drawn_in_another_colour() -> None:
    benchmark = dataclasses.replace(TOY, variants=("tierstore", "one"))
    panel = Figure().subplots()
    records = [Record(variant, 1, {"size_bytes": 2.0**20}) for variant in benchmark.variants]
    draw_panel(panel, "size_bytes", benchmark, Results(records, {}, {}))
    ours, other = (patch.get_facecolor() for patch in panel.patches)
    assert ours != other

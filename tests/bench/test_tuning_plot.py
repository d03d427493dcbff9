"""The plot of the prefetch tuning: of the recorded steps, with a point for each policy."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from bench.harness import Record, Results
from bench.prefetch_tuning import BENCHMARK, PLAIN
from bench.tuning_plot import draw, draw_policies

MISSES = {"hits": 0.0, "late": 0.0, "misses": 8.0}


def figures(seconds: float) -> dict[str, float]:
    waits = {"pack_waits_seconds": 0.1, "unpack_waits_seconds": 0.2}
    return (
        {"step_seconds": seconds, "least_step_seconds": seconds - 1, "most_step_seconds": seconds + 2} | waits | MISSES
    )


def test_draw_some_variants_missing_is_of_those_that_ran(tmp_path: Path) -> None:
    ran = [Record(BENCHMARK.variants[number], 1, figures(number + 2.0)) for number in range(6)]
    failed = [Record(variant, 1, None, "it broke") for variant in BENCHMARK.variants[6:]]
    file = draw(BENCHMARK, Results([*ran, *failed], {}, {}), tmp_path)
    assert file == tmp_path / "prefetch_tuning.png"
    drawn = file.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    draw(BENCHMARK, Results([*ran[:-1], *failed], {}, {}), tmp_path)
    assert file.read_bytes() != drawn
    assert draw(BENCHMARK, Results(failed, {}, {}), tmp_path) is None


def test_draw_policies_points_spread_waits_and_answers() -> None:
    steps, waits, answers = Figure().subplots(3, 1)
    policies = {"none": figures(5), "learned, 8 MiB": figures(3), "learned, automatic": figures(2)}
    draw_policies((steps, waits, answers), policies | {PLAIN: {"step_seconds": 1.0}})
    lines = {container.get_label(): container.lines for container in steps.containers}
    middle, caps, _ = lines["learned"]
    assert (list(middle.get_xdata()), list(middle.get_ydata())) == ([0, 1, 3], [5, 3, 2])
    assert [list(cap.get_ydata()) for cap in caps] == [[4, 2, 1], [7, 5, 4]]
    assert list(lines["reverse"][0].get_xdata()) == [0]
    waited = {line.get_label(): list(line.get_ydata()) for line in waits.lines}
    assert (waited["learned: unpack"], waited["learned: pack"]) == ([0.2] * 3, [0.1] * 3)
    assert sum(bar.get_height() for bar in answers.patches) == 4 * 8, "one bar of nothing ahead for each order"

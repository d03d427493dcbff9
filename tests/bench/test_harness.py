"""The harness: fresh processes, interleaved rounds, what is written and read back, tables and plots of it."""

import dataclasses
import json
import platform
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

import bench.__main__ as command
from bench.harness import RESULTS, Record, Results, processes_of, read_results, run_benchmark
from bench.report import goals_as_markdown, table_of, verdicts_of
from tests.bench.toy import BENCHMARK as TOY
from tierstore.disk.native import SWITCH as NATIVE_SWITCH


@pytest.fixture(scope="module")
def toy_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("toy")
    (directory / "drive").mkdir()
    run_benchmark(TOY, directory / "drive", None, lambda text: None, directory / "results")
    return directory / "results"


def test_run_each_round_starts_with_another_variant_and_writes_figures_or_why_there_are_none(toy_results: Path) -> None:
    results = read_results("toy", toy_results)
    assert results is not None
    order = [(record.round, record.variant) for record in results.records]
    assert order == [(1, "one"), (1, "two"), (1, "broken"), (2, "two"), (2, "broken"), (2, "one")]
    records = {record.variant: record for record in results.records}
    assert records["one"].figures == {"width_seconds": 1.0, "size_bytes": 2.0**20, "only_one": 1.0}
    assert records["two"].figures["width_seconds"] == 2.0
    assert (records["broken"].figures, records["broken"].failure) == (None, "exit code 1: RuntimeError: it broke")


@pytest.mark.parametrize(("switch", "is_native"), [(None, 1.0), ("0", 0.0)])
def test_threads_in_c_are_used_where_they_are_installed_unless_the_user_turns_them_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str | None, is_native: float
) -> None:
    pytest.importorskip("tierstore_native")
    monkeypatch.delenv(NATIVE_SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(NATIVE_SWITCH, switch)
    run_benchmark(dataclasses.replace(TOY, variants=("in C",), rounds=1), tmp_path, None, print, tmp_path / "results")
    (record,) = read_results("toy", tmp_path / "results").records
    assert record.figures == {"is_native": is_native}


def test_run_lines_tell_machine_and_versions_but_no_host_or_path(toy_results: Path) -> None:
    text = (toy_results / "toy.jsonl").read_text()
    line = json.loads(text.splitlines()[0])
    assert line["settings"] == {"answer": 42}
    assert set(line["machine"]) == {"cpu", "cores", "memory_bytes", "disk", "file_system"}
    assert line["versions"]["torch"]
    assert not [word for word in line["machine"].values() if isinstance(word, str) and "/" in word]
    assert str(Path.home()) not in text
    assert str(toy_results.parent) not in text
    if len(platform.node()) > 2:  # a name such as "vm" is part of other words
        assert platform.node() not in text


def test_run_ends_with_what_is_concluded_of_all_runs_and_what_they_left(tmp_path: Path) -> None:
    def conclude(records: Sequence[Record], folder: Path) -> dict[str, dict[str, float]]:
        files = sorted(file.name for file in folder.iterdir())
        assert files == ["left.txt"], "scratch directories are gone, what lies beside them is not"
        return {"both": {"width_seconds": sum(record.figures["width_seconds"] for record in records)}}

    summed = dataclasses.replace(TOY, variants=("leaves", "two", "both"), concluded=("both",), conclude=conclude)
    run_benchmark(summed, tmp_path, 1, lambda text: None, tmp_path / "results")
    records = read_results("toy", tmp_path / "results").records
    assert [(record.round, record.variant) for record in records] == [(1, "leaves"), (1, "two"), (2, "both")]
    assert records[-1].figures == {"width_seconds": 3.0}
    assert [file.name for file in tmp_path.iterdir()] == ["results"]


def test_table_tells_medians_spread_and_failures(toy_results: Path) -> None:
    text = table_of(TOY, read_results("toy", toy_results))
    assert re.search(r"width \(s\) +1 +2\n", text)
    assert re.search(r"only one +1 +-\n", text), "what only one variant gives"
    assert "broken, round 2: exit code 1: RuntimeError: it broke" in text
    runs = [Record("one", number, {"size_bytes": size * 2.0**20}) for number, size in enumerate((1, 900, 2))]
    assert "2 (1 to 900)" in table_of(TOY, Results(runs, {}, {}))


def test_variant_of_two_processes_has_the_figures_of_both(toy_results: Path) -> None:
    runs = [Record("two", 1, {"width_seconds": 2.0}), Record("one", 1, {"width_seconds": 2.0}), Record("two", 1, {})]
    results = Results(runs, {}, {})
    assert verdicts_of(TOY, results)[0].median == 1.0
    assert runs[0].figures == {"width_seconds": 2.0}


def test_page_of_goals_tells_outcomes_and_what_ran_on_which_machine(toy_results: Path) -> None:
    toy = read_results("toy", toy_results)
    other = Results(toy.records, toy.machine | {"cpu": "another"}, toy.versions)
    page = goals_as_markdown({"toy": verdicts_of(TOY, toy)}, {"toy": toy, "late": other, "later": other})
    assert "| toy | too little (two) | ≥ 3 x one | 2 | missed: it is small |" in page
    for outcome in ("met", "missed: it is small", "not measured"):
        assert page.count(f"| {outcome} |") == 1
    assert page.count("\n* ") == 2
    assert "* another, " in page
    assert f"torch {toy.versions['torch']}: late, later." in page
    assert f"torch {toy.versions['torch']}: toy." in page
    assert [verdict.outcome for verdict in verdicts_of(TOY, None)] == ["not measured"] * 3


NEWER = {"data_plane": {"get_waits"}}
"""Figures that the results in `bench/results` itself have not yet; those of `amd_epyc` have."""


@pytest.mark.parametrize("name", command.NAMES)
def test_every_benchmark_names_its_own_variants_and_figures(name: str) -> None:
    module = import_module(f"bench.{name}")
    benchmark, results = module.BENCHMARK, read_results(name)
    assert benchmark.name == name
    assert callable(module.measure)
    assert processes_of(benchmark)
    assert {variant for shared in benchmark.processes.values() for variant in shared} <= set(benchmark.variants)
    for goal in benchmark.goals:
        assert set(goal.variants) <= set(benchmark.variants), goal.what
    if results is not None and {record.variant for record in results.records} == set(benchmark.variants):
        newer = NEWER.get(name, set())
        assert {goal.figure for goal in benchmark.goals} | set(benchmark.plotted or ()) <= _given(results) | newer
        assert not newer & _given(results), "they are not newer any more"
        assert newer <= _given(read_results(name, RESULTS / "amd_epyc"))


def _given(results: Results | None) -> set[str]:
    return {figure for record in results.records for figure in record.figures or {}} if results else set()


def test_recorded_results_tables_page_and_plots_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, recorded = RESULTS / "amd_epyc", ("memory_limit", "pack_cost", "memory_plan")
    for name in recorded:
        (tmp_path / f"{name}.jsonl").write_bytes((folder / f"{name}.jsonl").read_bytes())
    benchmarks = [command.load(name) for name in recorded]
    command.conclude(benchmarks, tmp_path)
    text = capsys.readouterr().out
    assert all(f"{benchmark.name}: {benchmark.question}" in text for benchmark in benchmarks)
    assert {file.stem for file in tmp_path.glob("*.png")} == set(recorded)
    assert "| memory_limit |" in (tmp_path / "goals.md").read_text()


def test_conclude_without_results_says_so_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_results("toy", tmp_path) is None
    assert command.conclude([command.load("memory_limit")], tmp_path) == 1
    assert "not measured" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nothing"], ["--rounds", "0"], ["--path", "/does/not/exist", "pack_cost"]])
def test_command_bad_arguments_exit_code_2(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as refused:
        command.main()
    assert refused.value.code == 2

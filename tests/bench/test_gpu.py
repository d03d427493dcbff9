"""The benchmarks of the accelerator path: all of it that runs without one, so that no slip waits for the device."""

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import cases as all_cases
from bench.gpu.cases import CASES, TINY_CASES, Case
from bench.gpu.models import ResNetShape
from bench.gpu.one import measure
from bench.gpu.runner import Budget, run_cases
from bench.gpu.targets import covered_fraction, floor_seconds, verdicts
from bench.gpu.variants import VARIANTS
from bench.gpu.workloads import WORKLOADS, fitting_batch

MIB = 2**20
REQUEST = {"device": "cpu", "steps": 1, "tiny": True}
FLOORS = {"copy_out_bytes_per_second": 10.0, "copy_in_bytes_per_second": 20.0}
NONE = {"forward_seconds": 2.0, "backward_seconds": 3.0, "saved_bytes": 40.0, "largest_saved_bytes": 5.0}


def _figures(variant: str, workload: str, scratch: Path, **options: object) -> dict[str, Any]:
    about = {"workload": workload, "variant": variant, "options": options, "scratch": str(scratch)}
    return measure(REQUEST | about)


@pytest.mark.parametrize("workload", [pytest.param("tiny resnet", marks=pytest.mark.slow), "tiny decoder"])
def test_variants_in_one_process_same_gradients(workload: str, tmp_path: Path) -> None:
    plain = _figures("none", workload, tmp_path)
    assert plain["saved_bytes"] >= plain["largest_saved_bytes"] > 0
    for variant in VARIANTS:
        if variant in ("none", "OffloadActivations", "tierstore, sidecar"):
            continue
        found = _figures(variant, workload, tmp_path, host_bytes=0, device_bytes=0, min_bytes=0)
        assert found["gradients"] == plain["gradients"], variant
        if variant.startswith("tierstore"):
            assert found["packed_bytes"] > 0


def test_floors_and_saved_tensor_on_the_cpu_every_figure_is_there_and_judged(tmp_path: Path) -> None:
    floors = measure(REQUEST | {"workload": "floors", "scratch": str(tmp_path)})
    rates = [name for name in floors if name.endswith("_bytes_per_second")]
    assert len(rates) == 5
    assert all(floors[name] > 0 for name in rates)
    found = measure(REQUEST | {"workload": "saved tensor", "scratch": str(tmp_path)})
    assert found["nothing_pack_us"] > 0
    assert found["nothing_unpack_us"] > 0
    goals = {verdict.goal.split()[-1]: verdict.value for verdict in verdicts({"saved tensor": found}, 0)}
    assert goals == {"device": found["stays_pack_us"], "it": found["leaves_pack_us"], "back": found["back_unpack_us"]}


def test_sidecar_variant_same_gradients() -> None:
    with TemporaryDirectory() as directory:  # a socket's address must be short
        plain = _figures("none", "tiny decoder", Path(directory))
        found = _figures("tierstore, sidecar", "tiny decoder", Path(directory), host_bytes=0, min_bytes=0)
    assert found["gradients"] == plain["gradients"]
    assert found["packed_bytes"] > 0


def test_command_tiny_on_the_cpu_runs_each_case_in_a_process_and_writes_it_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all of them here, which takes 40 CPU seconds: `python -m bench.gpu --tiny --device cpu`."""
    names = ("tiny resnet: none", "tiny resnet: OffloadActivations")
    some = [case._replace(expected_seconds=80) for case in TINY_CASES if case.name in names]  # also on a busy machine
    monkeypatch.setattr(command, "TINY_CASES", some)
    monkeypatch.setattr(all_cases, "find_spec", lambda name: None)  # TRL may be installed here
    assert command.main(["--tiny", "--device", "cpu", "--results", str(tmp_path), "--path", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("gpu_*.json")
    document = json.loads(file.read_text())
    assert [run["case"] for run in document["runs"]] == ["tiny resnet: none"]
    why = "neither torchtune nor TRL is installed"
    assert document["left_out"] == {"tiny resnet: OffloadActivations": why}
    assert file.with_suffix(".png").exists()
    assert str(tmp_path) not in file.read_text()
    assert f"left out, {why}" in capsys.readouterr().out


def test_cases_are_of_what_exists_once_each_and_chosen_by_a_text_with_what_they_need() -> None:
    for cases in (CASES, TINY_CASES):
        assert len({case.name for case in cases}) == len(cases)
        assert {case.workload for case in cases} - {"floors", "saved tensor"} <= WORKLOADS.keys()
        assert {case.variant for case in cases} - {""} <= set(VARIANTS)
    chosen = [case.name for case in command._chosen(CASES, ["half to disk", "sidecar"])]
    assert chosen == [
        "floors",
        "resnet152: none",
        "decoder 2048 wide, 8k tokens: none",
        "decoder 2048 wide, 8k tokens: tierstore, sidecar",
        "resnet152: tierstore, half to disk",
    ]
    assert command._chosen(CASES, []) == list(CASES)


@pytest.mark.parametrize(
    ("expected_seconds", "budget", "why"),
    [
        (1e9, 5, "no time: 5 s are left, it takes some 1000000000 s"),
        (1, 1.01, "no time: it was ended after 1 s, when none was left"),
    ],
)
def test_run_cases_time_too_short_leaves_out_and_says_which(
    tmp_path: Path, expected_seconds: float, budget: float, why: str
) -> None:
    began, told = time.monotonic(), []
    cases = [Case("tiny resnet", "none", expected_seconds=expected_seconds)]
    outcome = run_cases(cases, Budget(budget), REQUEST | {"tiny": False}, tmp_path, told.append)
    assert time.monotonic() - began < 5
    assert (outcome.runs, outcome.left_out) == ([], {"tiny resnet: none": why})
    assert f"tiny resnet: none: left out, {why}" in told


def test_run_cases_that_fails_or_takes_too_long_is_told_and_those_that_need_it_are_left_out(tmp_path: Path) -> None:
    needy = next(case for case in TINY_CASES if case.label.endswith("covers"))
    cases = (Case("no such workload", "none"), needy, Case("tiny resnet", "none", expected_seconds=0.01))
    outcome = run_cases(cases, Budget(60), REQUEST, tmp_path, lambda text: None)
    failed, late = outcome.runs
    assert failed.figures is None
    assert "KeyError" in (failed.failure or "")
    assert late.failure == "not done within 0.03 s"
    assert list(outcome.left_out) == [needy.name]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free_gib", "batch"), [(141, 256), (79, 256), (39, 128), (23, 64), (15, 32), (1, 1)])
def test_batch_is_halved_until_plain_training_fits_the_device(free_gib: int, batch: int) -> None:
    assert fitting_batch("resnet152", free_gib * 2**30) == batch
    shape = WORKLOADS["resnet152"].with_batch(batch).shape
    assert isinstance(shape, ResNetShape)
    assert shape.batch == batch
    assert fitting_batch("resnet152", None) is None
    assert fitting_batch("decoder 2048 wide, 4k tokens", 2**30) is None
    assert WORKLOADS["resnet152"].with_batch(None) is WORKLOADS["resnet152"]


def test_floor_is_the_slower_of_compute_and_copies_and_what_both_ways_cover_beside_compute() -> None:
    assert [floor_seconds(NONE, FLOORS, nbytes) for nbytes in (10, 40, 80)] == [2 + 3, 4 + 3, 8 + 4]
    assert covered_fraction(NONE, FLOORS) == 0.5
    assert covered_fraction(NONE | {"saved_bytes": 10.0}, FLOORS) == 1


def test_verdicts_only_of_what_was_measured() -> None:
    ours = {"step_seconds": 7.7, "offloaded_bytes": 40.0, "peak_bytes": 30.0}
    found = {"floors": FLOORS, "net: none": NONE, "net: tierstore": ours}
    (only,) = verdicts(found, 10)
    assert (only.value, only.at_most, only.is_met) == (pytest.approx(1.1), 1.15, True)
    found["net: save_on_cpu"] = {"step_seconds": 14.0, "peak_bytes": 4.0}
    _, speed_up, peak = verdicts(found, 10)
    assert speed_up.value == pytest.approx(1.1)
    assert (peak.value, peak.at_most, peak.is_met) == (30.0, 4 + 10 + 15, False)
    found["net: tierstore, as much as compute covers"] = {"step_seconds": 5.1, "forward_queueing_seconds": 0.7}
    found["net: none"] = NONE | {"step_seconds": 5.0, "forward_queueing_seconds": 0.5}
    assert [verdict.is_met for verdict in verdicts(found, 10)][-2:] == [True, False]
    found["net: checkpoint"], found["net: tierstore, checkpoint"] = {"step_seconds": 10.0}, {"step_seconds": 10.5}
    assert [verdict.is_met for verdict in verdicts(found, 10)][-1] is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_command_without_a_device_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert "--tiny --device cpu" in capsys.readouterr().err

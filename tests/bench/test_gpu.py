"""The benchmarks of the accelerator path: all of it that runs without one, so that no slip waits for the device."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as command
from bench.gpu import cases as all_cases
from bench.gpu.cases import TINY_CASES
from bench.gpu.one import measure
from bench.gpu.targets import covered_fraction, floor_seconds, verdicts
from bench.gpu.variants import VARIANTS

MIB = 2**20
REQUEST = {"device": "cpu", "steps": 1, "tiny": True}
FLOORS = {"copy_out_bytes_per_second": 10.0, "copy_in_bytes_per_second": 20.0}
NONE = {"forward_seconds": 2.0, "backward_seconds": 3.0, "saved_bytes": 40.0, "largest_saved_bytes": 5.0}


def _figures(variant: str, workload: str, scratch: Path, **options: object) -> dict[str, Any]:
    about = {"workload": workload, "variant": variant, "options": options, "scratch": str(scratch)}
    return measure(REQUEST | about)


@pytest.mark.parametrize("workload", [pytest.param("tiny resnet", marks=pytest.mark.slow), "tiny decoder"])
def test_variants_same_gradients(workload: str, tmp_path: Path) -> None:
    plain = _figures("none", workload, tmp_path)
    assert plain["saved_bytes"] >= plain["largest_saved_bytes"] > 0
    for variant in VARIANTS:
        if variant in ("none", "OffloadActivations", "tierstore, plan"):  # a plan needs a device's limit
            continue
        found = _figures(variant, workload, tmp_path, host_bytes=0, device_bytes=0, min_bytes=0)
        assert found["gradients"] == plain["gradients"], variant
        if variant.startswith("tierstore"):
            assert found["packed_bytes"] > 0


def test_floors_and_saved_tensor_on_the_cpu_every_figure_is_there_and_judged(tmp_path: Path) -> None:
    floors = measure(REQUEST | {"workload": "floors", "scratch": str(tmp_path)})
    rates = [name for name in floors if name.endswith("_bytes_per_second")]
    assert len(rates) == 4
    assert all(floors[name] > 0 for name in rates)
    found = measure(REQUEST | {"workload": "saved tensor", "scratch": str(tmp_path)})
    assert found["nothing_pack_us"] > 0
    assert found["nothing_unpack_us"] > 0
    goals = {verdict.goal.split()[-1]: verdict.value for verdict in verdicts({"saved tensor": found}, 0)}
    assert goals == {"device": found["stays_pack_us"], "it": found["leaves_pack_us"], "back": found["back_unpack_us"]}


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


def test_floor_is_the_slower_of_compute_and_copies_and_what_both_ways_cover_beside_compute() -> None:
    assert [floor_seconds(NONE, FLOORS, nbytes) for nbytes in (10, 40, 80)] == [2 + 3, 4 + 3, 8 + 4]
    assert covered_fraction(NONE, FLOORS) == 0.5
    assert covered_fraction(NONE | {"saved_bytes": 10.0}, FLOORS) == 1

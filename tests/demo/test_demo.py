"""The demo's parts: what compares, what chooses, what is measured; and one real pair of runs."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tierstore.base.config import format_bytes
from tierstore.demo import DemoFailedError, DemoResult, DemoSettings
from tierstore.demo.launch import WatchedRun, run_in_fresh_process
from tierstore.demo.memory import PeakHostMemory, resident_bytes
from tierstore.demo.model import ByteTransformer, ModelShape, random_batch
from tierstore.demo.place import file_system_of, store_directory
from tierstore.demo.runs import Difference, RunReport, RunRequest, first_difference
from tierstore.demo.table import verdict
from tierstore.demo.text import load_text
from tierstore.demo.worker import digest
from tierstore.errors import ConfigError

MIB = 2**20
SMALL = DemoSettings(steps=2, layers=1, width=64, context=16, batch=1)


def report_with(digests: list[dict[str, str]]) -> RunReport:
    """A run of as many steps, of which only the digests matter."""
    steps = len(digests)
    return RunReport("CPU", "2", 1, [1.0] * steps, [2.0] * steps, digests, MIB, None, None)


# --- comparison ---------------------------------------------------------------------------------------------------


def test_first_difference_same_digests_none() -> None:
    digests = [{"loss": "1", "a": "2"}, {"loss": "3", "a": "4"}]
    assert first_difference(digests, [dict(step) for step in digests]) is None


def test_first_difference_two_steps_differ_names_the_first() -> None:
    one = [{"loss": "1", "a": "2", "b": "3"}, {"loss": "4", "a": "5", "b": "6"}, {"loss": "7", "a": "8", "b": "9"}]
    other = [one[0], one[1] | {"b": "changed"}, one[2] | {"a": "changed"}]
    assert first_difference(one, other) == Difference(2, "b")


@pytest.mark.parametrize("longer", [0, 1])
def test_first_difference_step_missing_differs(longer: int) -> None:
    runs = ([{"loss": "1"}], [{"loss": "1"}])
    runs[longer].append({"loss": "2"})
    assert first_difference(*runs) == Difference(2, "loss")


@pytest.mark.parametrize("poorer", [0, 1])
def test_first_difference_parameter_missing_differs(poorer: int) -> None:
    runs = [{"loss": "1", "a": "2"}], [{"loss": "1", "a": "2"}]
    del runs[poorer][0]["a"]
    assert first_difference(*runs) == Difference(1, "a")


def test_verdict_gradient_differs_says_no_and_where() -> None:
    result = DemoResult(SMALL, 0, report_with([{"a": "1"}, {"a": "2"}]), report_with([{"a": "1"}, {"a": "3"}]))
    assert verdict(result) == "gradients bitwise identical: no (first at step 2: the gradient of a)"
    figures = result.as_dict()
    assert figures["gradients_identical"] is False
    assert figures["first_difference"] == {"step": 2, "name": "a"}


def test_digest_lowest_bit_flipped_differs() -> None:
    tensor = torch.randn(3, 5)
    changed = tensor.clone()
    changed.view(torch.int32)[2, 4] ^= 1
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(changed)
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(tensor.t()) == digest(tensor.t().contiguous())


# --- settings, text, place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["steps", "layers", "width", "context", "batch"])
def test_settings_zero_names_the_option(option: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option}=0 "):
        DemoSettings(**{option: 0})


def test_settings_width_no_multiple_of_a_head_refused() -> None:
    with pytest.raises(ConfigError, match=r"--width=100 .*multiple of 64"):
        DemoSettings(width=100)


def test_text_default_is_long_enough_to_train_on() -> None:
    assert len(load_text(None, at_least_bytes=513)) > 100_000


def test_text_exactly_long_enough_accepted(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(17))
    assert load_text(str(file), at_least_bytes=17) == bytes(17)
    with pytest.raises(ConfigError, match="it holds 17 bytes, and one sequence needs 18"):
        load_text(str(file), at_least_bytes=18)


def test_store_directory_is_the_one_given_or_the_first_usual_one_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/dev/shm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store_directory(None) == tmp_path
    monkeypatch.chdir(tmp_path.parent)
    assert store_directory(None) == tmp_path.parent
    assert store_directory("/dev/shm") == Path("/dev/shm")


def test_file_system_of_known_mounts() -> None:
    assert file_system_of(Path("/proc/self")) == "proc"


# --- measuring ----------------------------------------------------------------------------------------------------


def test_peak_host_memory_sees_what_is_freed_again() -> None:
    with PeakHostMemory() as host:
        before = resident_bytes()
        taken = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc may have some left
        torch.frombuffer(taken, dtype=torch.uint8).fill_(1)
        while host.added_bytes < 60 * MIB:  # until a sample has seen it; the test's time limit ends it otherwise
            pass
        del taken
        assert resident_bytes() < before + 32 * MIB
    assert 60 * MIB <= host.added_bytes < 100 * MIB


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.5 KiB"),
        (130 * MIB, "130 MiB"),
        (1300 * MIB, "1.27 GiB"),
        (2**21 * MIB, "2.00 TiB"),
    ],
)
def test_format_bytes_three_digits_and_a_unit(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_batch_targets_are_the_next_bytes() -> None:
    corpus = torch.arange(100, dtype=torch.uint8)
    tokens, targets = random_batch(corpus, 4, 16, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens + 1, targets)


def test_model_looks_only_backwards() -> None:
    torch.manual_seed(0)
    model = ByteTransformer(ModelShape(layers=1, width=64, heads=1, context=8))
    embedded: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    with torch.no_grad():
        model(tokens, tokens)
        model(changed, tokens)
    assert torch.equal(embedded[0][:, :-1], embedded[1][:, :-1])
    assert not torch.equal(embedded[0][:, -1], embedded[1][:, -1])


# --- runs in fresh processes --------------------------------------------------------------------------------------


def test_run_digests_same_for_the_same_seed_only() -> None:
    def digests_of(seed: int) -> Sequence[Mapping[str, str]]:
        settings = replace(SMALL, seed=seed)
        steps: list[int] = []
        watch = WatchedRun(stepped=lambda step, loss: steps.append(step))
        digests = run_in_fresh_process("plain", RunRequest(settings), watch).digests
        assert steps == [1, 2]
        assert len(digests) == 2
        return digests

    one, again, other = (digests_of(seed) for seed in (0, 0, 1))
    assert set(one[0]) > {"loss", "head.weight", "blocks.0.mlp.0.bias"}
    assert first_difference(one, again) is None
    assert first_difference(one, other) == Difference(1, "loss")


def test_run_that_crashes_says_what_it_wrote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.write(2, b'struck by lightning')\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DemoFailedError, match=r"the plain run was ended by SIGABRT; it wrote:\n.*lightning"):
        run_in_fresh_process("plain", RunRequest(SMALL), WatchedRun())


def test_demo_imports_no_torch_before_its_workers_do() -> None:
    code = "import sys, tierstore.cli, tierstore.demo.present; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

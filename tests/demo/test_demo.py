"""The demo's parts: what compares, what chooses, what is measured; and real runs."""

import mmap
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tierstore.base.config import format_bytes
from tierstore.demo import DemoSettings
from tierstore.demo.compare import first_difference, run_training
from tierstore.demo.memory import PeakHostMemory, resident_bytes
from tierstore.demo.model import ByteTransformer, ModelShape, random_batch
from tierstore.demo.place import file_system_of, store_directory
from tierstore.demo.settings import load_text
from tierstore.demo.training import digest, prepare
from tierstore.errors import ConfigError, TierStoreError

MIB = 2**20
SMALL = DemoSettings(steps=2, layers=1, width=64, context=16, batch=1)
_THREE = [{"loss": "1", "a": "2", "b": "3"}, {"loss": "4", "a": "5", "b": "6"}, {"loss": "7", "a": "8", "b": "9"}]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([dict(step) for step in _THREE], None),
        ([_THREE[0], _THREE[1] | {"b": "changed"}, _THREE[2] | {"a": "changed"}], (2, "b")),
        (_THREE[:2], (3, "loss")),
        ([{"loss": "1", "b": "3"}, *_THREE[1:]], (1, "a")),
    ],
)
def test_first_difference_is_of_the_first_step_or_name_that_differs_or_is_missing(
    other: list[dict[str, str]], expected: tuple[int, str] | None
) -> None:
    assert first_difference(_THREE, other) == first_difference(other, _THREE) == expected


def test_digest_lowest_bit_flipped_differs() -> None:
    tensor = torch.randn(3, 5)
    changed = tensor.clone()
    changed.view(torch.int32)[2, 4] ^= 1
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(changed)
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(tensor.t()) == digest(tensor.t().contiguous())


# --- settings, text, place ----------------------------------------------------------------------------------------


def test_settings_out_of_range_and_text_that_is_too_short_are_refused(tmp_path: Path) -> None:
    for option in ("steps", "layers", "width", "context", "batch"):
        with pytest.raises(ConfigError, match=f"--{option}=0 "):
            DemoSettings(**{option: 0})
    with pytest.raises(ConfigError, match=r"--width=100 .*multiple of 64"):
        DemoSettings(width=100)
    assert len(load_text(None, at_least_bytes=513)) > 100_000
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


def test_format_bytes_three_digits_and_a_unit() -> None:
    sizes = {0: "0 B", 999: "999 B", 1536: "1.5 KiB", 130 * MIB: "130 MiB", 1300 * MIB: "1.27 GiB"}
    sizes |= {2**21 * MIB: "2.00 TiB"}
    assert {nbytes: format_bytes(nbytes) for nbytes in sizes} == sizes


def test_batch_targets_are_the_next_bytes_and_the_model_looks_only_backwards() -> None:
    corpus = torch.arange(100, dtype=torch.uint8)
    tokens, targets = random_batch(corpus, 4, 16, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens + 1, targets)
    torch.manual_seed(0)
    model = ByteTransformer(ModelShape(layers=1, width=64, heads=1, context=16))
    embedded: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    changed = tokens.clone()
    changed[:, -1] += 1
    with torch.no_grad():
        model(tokens, targets)
        model(changed, targets)
    assert torch.equal(embedded[0][:, :-1], embedded[1][:, :-1])
    assert not torch.equal(embedded[0][:, -1], embedded[1][:, -1])


class _Calls(TorchDispatchMode):
    """Which functions were called on a single element, with which dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].numel() == 1:
            self.seen.add((func.overloadpacket.__name__, args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_demo_calls_all_that_pytorch_leaves_to_mkl_by_one_thread_before_it_trains() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h"
    names = re.findall(r"^IMPLEMENT_VML_MKL\((\w+), \w+\)", header.read_text(), re.MULTILINE)
    assert names, "PyTorch's header reads otherwise now"
    with _Calls() as calls:
        prepare(SMALL, torch.device("cpu"))
    assert {(name, dtype) for name in names for dtype in (torch.float32, torch.float64)} <= calls.seen


# --- runs in fresh processes --------------------------------------------------------------------------------------


def test_run_digests_are_those_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def digests_of(seed: int) -> Sequence[Mapping[str, str]]:
        lines: list[str] = []
        digests = run_training("plain", replace(SMALL, seed=seed), lines.append).digests
        assert [line[:18] for line in lines] == ["plain: step 1 of 2", "plain: step 2 of 2"]
        assert len(digests) == 2
        return digests

    one, other = (digests_of(seed) for seed in (0, 1))  # with the same seed: `test_cli.py`
    assert set(one[0]) > {"loss", "head.weight", "blocks.0.mlp.0.bias"}
    assert first_difference(one, other) == (1, "loss")


def test_run_that_crashes_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TierStoreError, match=r"^the plain run was ended by SIGABRT$"):
        run_training("plain", SMALL, lambda line: None)

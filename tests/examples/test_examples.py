"""Every example, run as a newcomer runs it: it ends well, its figures are right, and it leaves nothing behind."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALL_EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
EXAMPLES = [name for name in ALL_EXAMPLES if name != "distributed.py"]
"""Those that python alone runs; `tests/hooks/test_distributed.py` runs the other, under torchrun."""
LONG = ("within_a_limit.py",)


def run(name: str, temporary: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`torch.vmap` loads torch's compiler, which makes a directory for its cache that stays: beside `temporary`."""
    return subprocess.run(
        [sys.executable, f"examples/{name}", *arguments],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1"}
        | os.environ
        | {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": f"{temporary}-of-torch"},
        capture_output=True,
        text=True,
        check=False,
    )


def figure(output: str, label: str) -> float:
    """The number that follows `label:`, the only one of that name."""
    (found,) = re.findall(rf"(?:^|; ){re.escape(label)}: ([0-9.]+)", output, re.MULTILINE)
    return float(found)


def lines_of(output: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in output.splitlines())


def check_tensor_network(output: str) -> None:
    assert lines_of(output)["gradient and Hessian-vector product bitwise identical"] == "yes"
    assert figure(output, "ratio of the two") >= 4
    assert figure(output, "most held in memory") <= figure(output, "host budget")
    assert figure(output, "on disk") >= 4 * figure(output, "host budget")  # at once: it could not all be in memory
    assert figure(output, "kept by choice") > 0


def check_larger_than_memory(output: str) -> None:
    assert lines_of(output)["gradient of the first 4096 values bitwise identical"] == "yes"
    assert figure(output, "saved tensors") > 1.5
    assert figure(output, "most on disk at once") > 0.5


def check_replicas_on_threads(output: str) -> None:
    assert lines_of(output)["gradients bitwise identical"] == "yes"
    assert figure(output, "replicas, each on a thread of its own") > 1
    assert figure(output, "tensors stored, scope around the threads") == 0
    assert figure(output, "tensors stored, offload_module") > 0
    assert figure(output, "handed to the store") >= 4 * figure(output, "host budget")
    assert figure(output, "most held in memory") <= figure(output, "host budget")
    assert figure(output, "on disk") >= figure(output, "host budget")


def check_saved_tensors_inspection(output: str) -> None:
    lines = lines_of(output)
    always = {"parameter": 256, "alive elsewhere": 512, "unsupported": 1024}
    for label, spilled, kept in (
        ("min_bytes=0", 2178, {"small": 0, "selected out": 0}),
        ("min_bytes='256KiB'", 2048, {"small": 130, "selected out": 0}),
        ("select=torch.is_floating_point", 2050, {"small": 0, "selected out": 128}),
    ):
        went, stayed = lines[label].split("; kept: ")
        assert went.endswith(f" tensors to the store, {spilled} KiB spilled")
        assert dict(re.findall(r"([a-z][a-z ]+) (\d+) KiB", stayed)) == {
            reason: str(kib) for reason, kib in (always | kept).items()
        }
    assert figure(output, "on disk before anybody looks") == 512
    assert figure(output, "looks at grad_fn._saved_self") == figure(output, "as saved") == 100
    assert figure(output, "read from disk for them") == 512
    assert lines["gradient right after the looks"] == "yes"
    assert lines["without the graph"] == "0 handles, 512 KiB lent"
    assert lines["without what was taken"] == "0 KiB lent"


def check_nested_scopes(output: str) -> None:
    nestings = {label: rest for label, rest in lines_of(output).items() if label != "outer > inner"}
    assert nestings == {
        "store one > nothing": "3, 0, 0 KiB, bitwise identical",
        "store one > store two": "2, 1, 0 KiB, bitwise identical",
        "store one > store one": "3, 0, 0 KiB, bitwise identical",
        "store one > keep_resident": "2, 0, 256 KiB, bitwise identical",
        "keep_resident > store one": "1, 0, 0 KiB, bitwise identical",
        "store one > save_on_cpu": "2, 0, 0 KiB, bitwise identical",
        "save_on_cpu > store one": "1, 0, 0 KiB, bitwise identical",
    }


def check_functional_transforms(output: str) -> None:
    lines = lines_of(output)
    with_hooks_off = "inside tiered_offload; with keep_resident(hooks=False) gradient bitwise identical"
    for name in ("grad", "vjp", "jacrev", "hessian", "vmap of grad"):
        assert lines[name] == f"is refused {with_hooks_off}"
    for name in ("jvp", "jacfwd", "vmap"):
        assert lines[name] == f"runs {with_hooks_off}"
    assert figure(output, "restored from disk") == 8 * 24 * 24 * 4 // 2**10
    assert "don't yet support saved tensor hooks" in lines["error"]
    assert "keep_resident(hooks=False)" in lines["note"]


def check_within_a_limit(output: str) -> None:
    assert output.endswith("gradients and buffers bitwise identical: yes\n")
    assert figure(output, "peak of planned steps") <= figure(output, "limit")
    assert "It fits" not in output


CHECKS: dict[str, Callable[[str], None]] = {
    "functional_transforms.py": check_functional_transforms,
    "larger_than_memory.py": check_larger_than_memory,
    "nested_scopes.py": check_nested_scopes,
    "replicas_on_threads.py": check_replicas_on_threads,
    "saved_tensors_inspection.py": check_saved_tensors_inspection,
    "tensor_network.py": check_tensor_network,
    "within_a_limit.py": check_within_a_limit,
}


def test_examples_each_has_a_check_and_a_row_in_the_table() -> None:
    assert list(CHECKS) == EXAMPLES
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[([a-z_]+\.py)\]\(\1\)", table, re.MULTILINE)) == ALL_EXAMPLES


def names_in_root() -> set[str]:
    """Without what pytest and Hypothesis may make at any moment."""
    return set(os.listdir(ROOT)) - {".pytest_cache", ".hypothesis"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.many if name in LONG else ()) for name in EXAMPLES]
)
def test_example_ends_well_with_right_figures_and_nothing_left(
    name: str, store_directory: Path, tmp_path: Path
) -> None:
    """Every other one in a directory of its own, the rest where they go without an argument."""
    before, temporary = names_in_root(), tmp_path / "temporary"
    temporary.mkdir()
    place = [str(store_directory)] if EXAMPLES.index(name) % 2 else []
    ended = run(name, temporary, *place)
    assert (ended.returncode, ended.stderr) == (0, "")
    CHECKS[name](ended.stdout)
    assert list(temporary.iterdir()) == []
    assert names_in_root() == before

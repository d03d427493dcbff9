"""Every example runs as its first lines say, prints what it promises, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = {"distributed.py": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]}
PROMISED: dict[str, list[str]] = {
    "tensor_network.py": [
        r"saved tensors: \d\d\.\d times the host budget of 2 MiB",
        r"most held in host memory: (1\.\d|2\.0) MiB",
        r"left in place by choice: [1-9]\d* bytes",
        r"gradient and Hessian product bitwise the same: yes",
    ],
    "replicas_on_threads.py": [
        r"scope on the main thread: 0 tensors stored",
        r"wrapped module on 4 threads: 32 tensors stored",
        r"gradients bitwise the same: yes",
    ],
    "saved_tensors_inspection.py": [
        r"default threshold \(1 MiB\): 3 tensors handed to the store",
        r"everything: 5 tensors handed to the store",
        r"only wide ones: 3 tensors handed to the store",
        r"left in place, small: [1-9]\d* bytes",
        r"left in place, selected out: [1-9]\d* bytes",
        r"grad_fn\._saved_self, read 3 times: the same each time",
        r"backward after that: right",
    ],
    "nested_scopes.py": [
        r"offload: 4 \+ 0 tensors stored .* gradient bitwise the same",
        r"offload, keep_resident inside: 1 \+ 0 tensors stored .* gradient bitwise the same",
        r"offload, save_on_cpu inside: 1 \+ 0 tensors stored .* gradient bitwise the same",
        r"save_on_cpu, offload inside: 3 \+ 0 tensors stored .* gradient bitwise the same",
        r"offload, another store inside: 1 \+ 3 tensors stored .* gradient bitwise the same",
    ],
    "functional_transforms.py": [
        r"under a scope: RuntimeError, with the advice:",
        r"keep_resident\(hooks=False\)$",
        r"Hessian and per-sample gradients computed",
        r"around it: 5 tensors stored",
    ],
    "distributed.py": [
        rf"rank {rank}, {kind}: [1-9]\d* bytes spilled so far, [1-9]\d* bytes of parameters left in place; "
        r"gradients bitwise the same: yes"
        for rank in (0, 1)
        for kind in ("DDP", "FSDP2")
    ],
}


def test_every_example_is_tested_and_listed() -> None:
    examples = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert examples == set(PROMISED)
    assert examples == set(re.findall(r"examples/(\w+\.py)", (ROOT / "examples" / "README.md").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISED)
def test_example_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *LAUNCH.get(name, []), str(ROOT / "examples" / name), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for pattern in PROMISED[name]:
        assert re.search(pattern, done.stdout, re.MULTILINE), f"{pattern!r} is not in\n{done.stdout}"
    assert done.stderr == "" or name in LAUNCH  # torchrun has its own say
    assert list(tmp_path.iterdir()) == []

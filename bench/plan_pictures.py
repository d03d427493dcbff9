"""`python -m bench.plan_pictures [DIRECTORY]`: draw the predicted step against the limit, for each of `plan_models`.

Each model is planned for half of the resident memory that plain training takes, in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

import tierstore

from .harness import RESULTS
from .plan_models import MODELS
from .plan_trainings import plain_peak


def main(folder: Path) -> None:
    """Write one picture for each model."""
    with tempfile.TemporaryDirectory() as scratch:
        for model in MODELS:
            limit_bytes = plain_peak(model, Path(scratch)) // 2
            command = [sys.executable, "-m", "bench.plan_pictures", str(folder), model, str(limit_bytes)]
            subprocess.run(command, check=True)


def draw(folder: Path, name: str, limit_bytes: int) -> None:
    """Plan one model and write its picture."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as drive, tierstore.TierStore(drive) as store:
        plan = tierstore.plan_memory(model, partial(model, *batch), store=store, limit=limit_bytes)
        print(plan)
        plan.plot(folder / f"memory_plan_{name.lower().replace(' ', '_').replace('-', '_')}.png")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    if len(sys.argv) > 2:
        draw(target, sys.argv[2], int(sys.argv[3]))
    else:
        main(target)

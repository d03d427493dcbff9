"""A benchmark of no question, for the harness's tests: `python -m tests.bench.toy`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bench.goals import Goal
from bench.harness import Benchmark, main_of_one_variant
from tierstore.disk.native import is_native

BENCHMARK = Benchmark(
    name="toy",
    question="Nothing",
    variants=("one", "two", "broken"),
    rounds=2,
    settings={"answer": 42},
    environment={"two": {"TOY": "2"}},
    module="tests.bench.toy",
    goals=(
        Goal("twice", "width_seconds", "two", at_most=2, of=("one",)),
        Goal("too little", "width_seconds", "two", at_least=3, of=("one",)),
        Goal("broken", "width_seconds", "broken", at_most=1),
    ),
)


def measure(variant: str, scratch: Path) -> dict[str, float] | dict[str, dict[str, float]]:
    if variant == "both":
        return {name: measure(name, scratch) for name in ("one", "two")}
    if variant == "in C":
        return {"is_native": float(is_native())}
    if variant == "broken":
        raise RuntimeError("it broke")
    if variant == "slow":
        time.sleep(100)
    if variant in ("left", "right"):
        (scratch.parent / variant).touch()
        await_file(scratch.parent / ("left" if variant == "right" else "right"))
    if list(scratch.iterdir()):
        raise RuntimeError("the scratch directory is not empty")
    if variant == "leaves":
        (scratch.parent / "left.txt").write_text("for whoever concludes")
    print("whatever is printed before the figures does not count")
    return {"width_seconds": float(os.environ.get("TOY", "1")), "size_bytes": 2.0**20, f"only_{variant}": 1.0}


def await_file(file: Path) -> None:
    ends = time.monotonic() + 60
    while not file.exists():
        if time.monotonic() > ends:
            raise RuntimeError(f"nobody made {file.name}")
        time.sleep(0.01)


if __name__ == "__main__":
    main_of_one_variant(measure)

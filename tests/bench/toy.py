"""A benchmark of no question, for the harness's tests: the module `tests.bench.toy`."""

from pathlib import Path

from bench.goals import Goal
from bench.harness import Benchmark
from tierstore.disk.native import is_native

ANSWER = 42
BENCHMARK = Benchmark(
    name="toy",
    question="Nothing",
    variants=("one", "two", "broken"),
    rounds=2,
    module="tests.bench.toy",
    goals=(
        Goal("twice", "width_seconds", "two", at_most=2, of=("one",)),
        Goal("too little", "width_seconds", "two", at_least=3, of=("one",), if_missed="it is small"),
        Goal("broken", "width_seconds", "broken", at_most=1),
    ),
)


def measure(variant: str, scratch: Path) -> dict[str, float]:
    if variant == "in C":
        return {"is_native": float(is_native())}
    if variant == "broken":
        raise RuntimeError("it broke")
    if list(scratch.iterdir()):
        raise RuntimeError("the scratch directory is not empty")
    if variant == "leaves":
        (scratch.parent / "left.txt").write_text("for whoever concludes")
    print("whatever is printed before the figures does not count")
    return {"width_seconds": 2.0 if variant == "two" else 1.0, "size_bytes": 2.0**20, f"only_{variant}": 1.0}

"""What is the lowest limit of resident memory within which a model trains at all, with each strategy?

The models, the strategies and the limits of `memory_plan`, which the kernel enforces by a memory cgroup. A limit is
searched by halving, in steps of 5 % of the resident memory of plain training. A strategy trains within a limit if it
takes three steps there. One that the kernel kills does not, nor does a plan that says it cannot fit: the highest limits
at which these happened are told apart.
"""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import Literal

from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .memory_plan import variant_of
from .plan_models import MODELS
from .plan_trainings import PLAN, REFUSED, SINGLE, plain_peak, training_within

PERCENTS = tuple(range(15, 70, 5))
NUM_STEPS = 3
STRATEGIES = (*SINGLE, PLAN)

BENCHMARK = Benchmark(
    name="lowest_limit",
    question="The lowest limit of memory that trains at all, of the memory that plain training takes",
    variants=tuple(variant_of(model, strategy) for model in MODELS for strategy in STRATEGIES),
    processes={model: tuple(variant_of(model, strategy) for strategy in STRATEGIES) for model in MODELS},
    rounds=1,
    compare="none",
    settings={"percents": PERCENTS, "num_steps": NUM_STEPS},
    timeout_seconds=3600,
    plotted=("lowest_to_plain",),
    goals=tuple(
        Goal(
            f"{model}: lowest limit, of the lowest of {strategy}",
            "lowest_to_plain",
            variant_of(model, PLAN),
            at_most=0.99,  # lower
            of=(variant_of(model, strategy),),
        )
        for model in MODELS
        for strategy in SINGLE
    ),
)


def measure(model: str, scratch: Path) -> dict[str, dict[str, float]]:
    """The lowest share of plain training's memory for each strategy."""
    plain_bytes = plain_peak(model, scratch)
    return {
        variant_of(model, strategy): {"plain_bytes": plain_bytes} | _lowest(model, strategy, plain_bytes, scratch)
        for strategy in STRATEGIES
    }


def _lowest(model: str, strategy: str, plain_bytes: int, scratch: Path) -> dict[str, float]:
    ended: dict[str, float] = {}

    def trains(percent: int) -> bool:
        how = _how_it_ends(model, strategy, plain_bytes * percent // 100, scratch)
        if how is not None:
            name = f"highest_{how}_to_plain"
            ended[name] = max(ended.get(name, 0), percent / 100)
        return how is None

    place = bisect_left(PERCENTS, True, key=trains)
    percent = PERCENTS[place] if place < len(PERCENTS) else 100
    return {"lowest_to_plain": percent / 100} | ended


def _how_it_ends(model: str, strategy: str, limit_bytes: int, scratch: Path) -> Literal["killed", "refused"] | None:
    """None: it trains."""
    with training_within(model, strategy, limit_bytes, scratch) as training:
        try:
            return None if all(training.step() for _ in range(NUM_STEPS)) else "killed"
        except RuntimeError:
            if training.exit_code != REFUSED:
                raise
            return "refused"


if __name__ == "__main__":
    main_of_one_variant(measure)

"""What the caching allocator brings to a memory plan: steps with it, beside steps without it.

The three models of `memory_plan` at the same limits. Two processes make a plan each, one with `TIERSTORE_ALLOCATOR=0`,
which returns memory as glibc does; then they take turns, of two steps, of which the second counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from .goals import Goal
from .harness import Benchmark, Record
from .memory_plan import ALL, CASES, PLAN_WARM_UP_STEPS, ratio_of, second_step, variant_of
from .plan_trainings import PLAN, PLAN_WITHOUT_ALLOCATOR, plain_peak, training_within
from .trainings import Figures, Training, turns_of

STRATEGIES = (PLAN, PLAN_WITHOUT_ALLOCATOR)
TURNS = 3

BENCHMARK = Benchmark(
    name="plan_allocator",
    question="A step under a memory plan, with the caching allocator and without it",
    variants=(*(variant_of(case, strategy) for case in CASES for strategy in STRATEGIES), ALL),
    processes={case: tuple(variant_of(case, strategy) for strategy in STRATEGIES) for case in CASES},
    timeout_seconds=1800,
    plotted=("step_seconds", "page_faults"),
    goals=(
        *(
            Goal(f"{case}: step, of the plan's without it", "step_to_other", variant_of(case, PLAN), at_most=0.9)
            for case in CASES
        ),
        *(Goal(f"{case}: kills", "out_of_memory_kills", variant_of(case, PLAN), at_most=0) for case in CASES),
        Goal("cases with a step of at most 0.9 of the plan's without it", "share_faster", ALL, at_least=0.5),
    ),
    conclude=lambda records, folder: _conclude(records),
    concluded=(ALL,),
)


def _conclude(records: Sequence[Record]) -> dict[str, Figures]:
    """In how many cases it brings a tenth. Nothing if no case was run."""
    ratios = [record.figures["step_to_other"] for record in records if "step_to_other" in (record.figures or {})]
    return {ALL: {"share_faster": sum(ratio <= 0.9 for ratio in ratios) / len(ratios)}} if ratios else {}


def measure(case: str, scratch: Path) -> dict[str, Figures]:
    """Medians of the steps of both within the case's limit; `step_to_other` is missing if the kernel killed one."""
    model, share = CASES[case]
    limit_bytes = plain_peak(model, scratch) * share // 100
    with ExitStack() as stack:
        trainings: dict[str, Training] = {}
        for strategy in STRATEGIES:  # one begins when the one before has warmed up
            folder = scratch / strategy.replace(" ", "_")
            folder.mkdir()
            trainings[strategy] = stack.enter_context(training_within(model, strategy, limit_bytes, folder))
            for _ in range(PLAN_WARM_UP_STEPS):
                trainings[strategy].step()
        turns = turns_of(trainings, TURNS, second_step)
        found = {name: each.figures([turn[name] for turn in turns if turn[name]]) for name, each in trainings.items()}
    if all(all(turn.values()) for turn in turns):
        found[PLAN]["step_to_other"] = ratio_of(PLAN, PLAN_WITHOUT_ALLOCATOR, turns)
    return {variant_of(case, strategy): figures for strategy, figures in found.items()}

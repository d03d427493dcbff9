"""Planned training under limits that the kernel enforces, beside each single strategy.

Three models at 75, 50 and 35 % of the resident memory that each takes when it is trained plainly, in memory cgroups.
Each strategy (`plan_trainings`) trains in a process of its own. First all of them take turns, a step each, which only
chooses the best single strategy: the best of several medians is lower than what it is a median of. Then the plan and
that one alone take turns, of two steps, of which the second counts. Processes of one decision differ by more than
strategies do, so several pairs are compared: the first has made the plan, the others load it from a file. A pair's
ratio is the median of its turns', a case's that of its pairs'. A strategy that the kernel kills has no step; if it
kills the best single strategy in a pair, the next best is compared.

The budget is 0, which keeps least. Its step is compared as a ratio to plain training compiled by the same backend. The
losses of the fourth step are compared with those of plain training.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from .goals import Goal
from .harness import Benchmark, Record
from .plan_models import MODELS
from .plan_trainings import COMPILED, LOADED_PLAN, PLAIN, PLAN, SINGLE, plain_peak, training_within
from .trainings import Figures, Training, turns_of

SHARES = (50, 35, 75)
STRATEGIES = (PLAIN, *SINGLE, PLAN)
CASES = {f"{model} at {share} %": (model, share) for share in SHARES for model in MODELS}
ALL = "all cases"
WARM_UP_STEPS, PLAN_WARM_UP_STEPS = 2, 5
"""A plan that was made in its process may decide again after four steps."""
TURNS = 2
"""Of all strategies; the fourth step is in the last."""
PAIRS, TURNS_OF_PAIR = 3, 2

Turn = dict[str, Figures]
"""A step of each strategy, without figures if the kernel has killed it."""


def variant_of(case: str, strategy: str) -> str:
    return f"{case}: {strategy}"


def _goals(case: str) -> list[Goal]:
    plan = variant_of(case, PLAN)
    return [
        Goal(f"{case}: trains, and is not killed", "trains", plan, at_least=1.0),
        Goal(f"{case}: peak, of the limit", "peak_to_limit", plan, at_most=1.0),
        Goal(f"{case}: peak, off the predicted", "peak_off_predicted", plan, at_most=0.03),
        Goal(f"{case}: step, off the predicted", "step_off_predicted", plan, at_most=0.05),
        Goal(f"{case}: step, of the best single strategy's", "step_to_best", plan, at_most=1.02),
        Goal(f"{case}: the solver, s", "decision_seconds", plan, at_most=10),
        Goal(f"{case}: fourth loss, bit for bit", "fourth_loss", plan, equals=1, of=(variant_of(case, PLAIN),)),
    ]


BENCHMARK = Benchmark(
    name="memory_plan",
    question="A plan of memory within 75, 50 and 35 % of what plain training takes",
    variants=(*(variant_of(case, strategy) for case in CASES for strategy in STRATEGIES), ALL),
    processes={case: tuple(variant_of(case, strategy) for strategy in STRATEGIES) for case in CASES},
    timeout_seconds=1800,
    plotted=("step_to_plain", "peak_bytes"),
    goals=(
        *(goal for case in CASES for goal in _goals(case)),
        Goal("cases with a step of at most 0.9 of the best single strategy's", "share_much_faster", ALL, at_least=0.5),
        Goal("cases slower than plain training with over 15 % of the limit unused", "num_with_room", ALL, at_most=0),
    ),
    conclude=lambda records, folder: _conclude(records),
    concluded=(ALL,),
)


def _conclude(records: Sequence[Record]) -> dict[str, Figures]:
    """In how many cases the plan is much faster, and in how many it leaves memory that could make it faster.

    One that was killed is neither. Where no single strategy lived, there is none to be faster than. Nothing if no case
    was run.
    """
    found = {record.variant: record.figures or {} for record in records}
    plans = [found[variant] for variant in (variant_of(case, PLAN) for case in CASES) if variant in found]
    if not plans:
        return {}
    much_faster = [plan for plan in plans if plan.get("step_to_best", 1.0) <= 0.9]
    trained = [plan for plan in plans if plan["trains"]]
    with_room = [plan for plan in trained if plan["step_to_plain"] > 1.02 and plan["peak_to_limit"] < 0.85]
    return {ALL: {"share_much_faster": len(much_faster) / len(plans), "num_with_room": float(len(with_room))}}


def measure(case: str, scratch: Path) -> dict[str, Figures]:
    """Medians of the steps of each strategy within the case's limit, and their highest peak."""
    model, share = CASES[case]
    limit_bytes = plain_peak(model, scratch) * share // 100
    limits: dict[str, int | None] = {PLAIN: None}
    limits |= dict.fromkeys(("checkpoint", "every other", "offload", PLAN), limit_bytes)
    with training_within(model, "budget", limit_bytes, scratch) as training:  # compiling takes minutes: tried alone
        budget = training.figures([training.step(), training.step()])
    if budget["out_of_memory_kills"] == 0:
        limits |= {COMPILED: None, "budget": limit_bytes}
    with ExitStack() as stack:
        trainings: dict[str, Training] = {}
        for strategy, limit in limits.items():  # one begins when the one before has warmed up
            trainings[strategy] = stack.enter_context(_warm(model, strategy, limit, scratch))
        turns = turns_of(trainings, TURNS)
        compared = _compared(model, limit_bytes, trainings, turns, scratch)
        found = {name: each.figures([turn[name] for turn in turns]) for name, each in trainings.items()}
    for strategy, figures in found.items():
        _add_figures_of_turns(strategy, figures, turns, limit_bytes)
    _add_figures_of_pairs(found[PLAN], compared, limit_bytes)
    if compared.best is not None:
        found[compared.best]["is_best"] = 1.0
    found.setdefault("budget", budget | {"trains": 0.0})
    found.setdefault(COMPILED, {})
    return {variant_of(case, strategy): found[strategy] for strategy in STRATEGIES}


@contextmanager
def _warm(model: str, strategy: str, limit_bytes: int | None, scratch: Path) -> Iterator[Training]:
    with training_within(model, strategy, limit_bytes, scratch) as training:
        for _ in range(PLAN_WARM_UP_STEPS if strategy == PLAN else WARM_UP_STEPS):
            training.step()
        yield training


class Compared(NamedTuple):
    """The turns of each pair of processes: the plan beside the best single strategy; None: all of these were killed."""

    best: str | None
    pairs: list[list[Turn]]

    @property
    def turns(self) -> list[Turn]:
        return [turn for pair in self.pairs for turn in pair]

    def lives(self, strategy: str) -> bool:
        """Whether the kernel has killed it in no pair."""
        return all(turn[strategy] for turn in self.turns)


def _compared(
    model: str, limit_bytes: int, trainings: dict[str, Training], turns: Sequence[Turn], scratch: Path
) -> Compared:
    for best in _fastest_first(turns):
        compared = Compared(best, [_turns_of_pair({best: trainings[best], PLAN: trainings[PLAN]})])
        while len(compared.pairs) < PAIRS and compared.lives(best) and compared.lives(PLAN):
            with (
                _warm(model, best, limit_bytes, scratch) as single,
                _warm(model, LOADED_PLAN, limit_bytes, scratch) as plan,
            ):
                compared.pairs.append(_turns_of_pair({best: single, PLAN: plan}))
        if compared.lives(best):
            return compared
    return Compared(None, [_turns_of_pair({PLAN: trainings[PLAN]})])


def _turns_of_pair(pair: dict[str, Training]) -> list[Turn]:
    return turns_of(pair, TURNS_OF_PAIR, second_step)


def second_step(training: Training) -> Figures:
    """Of two; its peak is that of both."""
    first, second = training.step(), training.step()
    return second and second | {"peak_bytes": max(first["peak_bytes"], second["peak_bytes"])}


def _to_plain(strategy: str, turns: Sequence[Turn]) -> float | None:
    against = COMPILED if strategy == "budget" else PLAIN
    if not all(turn.get(strategy) for turn in turns):
        return None
    return ratio_of(strategy, against, turns)


def _fastest_first(turns: Sequence[Turn]) -> list[str]:
    """The single strategies that were not killed."""
    found = {strategy: ratio for strategy in SINGLE if (ratio := _to_plain(strategy, turns)) is not None}
    return sorted(found, key=found.__getitem__)


def _add_figures_of_turns(strategy: str, figures: Figures, turns: Sequence[Turn], limit_bytes: int) -> None:
    to_plain = _to_plain(strategy, turns)
    figures["trains"] = float(to_plain is not None)
    if to_plain is not None:
        figures["fourth_loss"] = turns[-1][strategy]["fourth_loss"]
        figures["peak_bytes"] = max(turn[strategy]["peak_bytes"] for turn in turns)
        figures["peak_to_limit"] = figures["peak_bytes"] / limit_bytes
        figures["step_to_plain"] = to_plain


def _add_figures_of_pairs(plan: Figures, compared: Compared, limit_bytes: int) -> None:
    """Of the plan: beside what was predicted, and beside the best single strategy."""
    plan["trains"] = float(bool(plan["trains"]) and compared.lives(PLAN))
    if not plan["trains"]:
        return
    steps = [turn[PLAN] for turn in compared.turns]
    highest = max(steps, key=lambda step: step["peak_bytes"])
    plan["peak_bytes"] = max(plan["peak_bytes"], highest["peak_bytes"])
    plan["peak_to_limit"] = plan["peak_bytes"] / limit_bytes
    plan["peak_off_predicted"] = abs(highest["peak_bytes"] / highest["predicted_bytes"] - 1)
    plan["step_seconds"] = statistics.median(step["step_seconds"] for step in steps)
    plan["step_off_predicted"] = abs(
        statistics.median(step["step_seconds"] / step["predicted_seconds"] for step in steps) - 1
    )
    if compared.best is not None:
        ratios = [ratio_of(PLAN, compared.best, turns) for turns in compared.pairs]
        plan |= {f"step_to_best_in_pair_{place}": ratio for place, ratio in enumerate(ratios, start=1)}
        plan["step_to_best"] = statistics.median(ratios)
        plan["cpu_to_best"] = ratio_of(PLAN, compared.best, compared.turns, "user_seconds", "system_seconds")


def ratio_of(strategy: str, other: str, turns: Sequence[Turn], *figures: str) -> float:
    """Of the sums of figures, by turns; without any, of the times of steps."""

    def of(step: Figures) -> float:
        return sum(step[figure] for figure in figures or ("step_seconds",))

    return statistics.median(of(turn[strategy]) / of(turn[other]) for turn in turns)

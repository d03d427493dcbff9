"""Planned training under limits that the kernel enforces, beside each single strategy.

Three models at 75, 50 and 35 % of the resident memory that each takes when it is trained plainly. The kernel enforces
the limit by a memory cgroup. Each strategy trains in a process of its own. First all of them take turns, a step each,
which finds the best single strategy. Then the plan and that one alone take turns. In each turn a training takes two
steps, of which the second counts: steps of a training follow each other, as those do by which a plan predicts. Ratios
count within a turn, and are told as medians with what is 95 % sure. The best of several medians is lower than what it
is a median of: so the first turns only choose. A strategy that the kernel kills has no step.

* *checkpoint*: every block by `torch.utils.checkpoint`; *every other*: every second one.
* *offload*: `tiered_offload(TierStore(directory))`, with default options.
* *budget*: `torch.compile` with the backend "aot_eager_decomp_partition" and an `activation_memory_budget` of 0, which
  keeps least. Its step is compared as a ratio to plain training compiled by the same backend, if it is not killed.
* *plan*: `plan_memory(..., limit=)`, which is told the limit and nothing else, then `apply`.

Times are medians; a peak is the most of all measured steps. All use SGD and the default environment. The losses of the
fourth step are compared with those of plain training.
"""

from __future__ import annotations

import gc
import json
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .cgroup import memory_cgroup
from .goals import Goal
from .harness import Benchmark, Record, main_of_one_variant
from .memory_limit import Figures, Training
from .paired import median_of
from .plan_models import MODELS, blocks_of_model

SHARES = (50, 35, 75)
PLAIN, COMPILED = "plain", "plain, compiled"
SINGLE = ("checkpoint", "every other", "offload", "budget")
PLAN = "plan"
STRATEGIES = (PLAIN, *SINGLE, PLAN)
CASES = {f"{model} at {share} %": (model, share) for share in SHARES for model in MODELS}
ALL = "all cases"
WARM_UP_STEPS, PLAN_WARM_UP_STEPS = 2, 5
"""The plan may decide again after four steps."""
TURNS, TURNS_OF_TWO = 3, 5
"""Of all strategies; of the plan and the best single one."""


def variant_of(case: str, strategy: str) -> str:
    """A name for the table."""
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
    rounds=1,
    compare="none",
    settings={
        "turns": (TURNS, TURNS_OF_TWO),
        "warm_up_steps": (WARM_UP_STEPS, PLAN_WARM_UP_STEPS),
        "num_threads": torch.get_num_threads(),
    },
    timeout_seconds=900,
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

    One that was killed is neither. Nothing if no case was run.
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
    budget = _with_least_budget(model, limit_bytes, scratch)
    if budget["out_of_memory_kills"] == 0:
        limits |= {COMPILED: None, "budget": limit_bytes}
    with ExitStack() as stack:
        trainings: dict[str, Training] = {}
        for strategy, limit in limits.items():  # one begins when the one before has warmed up
            trainings[strategy] = stack.enter_context(training_within(model, strategy, limit, 0.0, scratch))
            for _ in range(PLAN_WARM_UP_STEPS if strategy == PLAN else WARM_UP_STEPS):
                trainings[strategy].step()
        turns = [
            {strategy: trainings[strategy].step() for strategy in order} for order in _orders(list(trainings), TURNS)
        ]
        best = _best_single(turns)
        rivals = [PLAN] if best is None else [best, PLAN]
        turns_of_two = [
            {strategy: _second_step(trainings[strategy]) for strategy in order}
            for order in _orders(rivals, TURNS_OF_TWO)
        ]
        found = {
            name: each.figures([turn[name] for turn in (turns_of_two if name == PLAN else turns)])
            for name, each in trainings.items()
        }
    for strategy, figures in found.items():
        _add_figures_of_turns(strategy, figures, turns, limit_bytes)
    _compare(found[PLAN], turns_of_two, best)
    found.setdefault("budget", budget | {"trains": 0.0})
    found.setdefault(COMPILED, {})
    return {variant_of(case, strategy): found[strategy] for strategy in STRATEGIES}


def _orders(strategies: list[str], num_turns: int) -> list[list[str]]:
    """Who goes first in one turn goes last in the next."""
    return [strategies if turn % 2 else strategies[::-1] for turn in range(num_turns)]


def _second_step(training: Training) -> Figures:
    """The second of two steps; its peak is that of both."""
    first, second = training.step(), training.step()
    return second and second | {"peak_bytes": max(first["peak_bytes"], second["peak_bytes"])}


def _to_plain(strategy: str, turns: Sequence[dict[str, Figures]]) -> float | None:
    """Its step, of plain training's, by turns; None: it was killed."""
    against = COMPILED if strategy == "budget" else PLAIN
    if not all(turn.get(strategy) for turn in turns):
        return None
    return statistics.median(turn[strategy]["step_seconds"] / turn[against]["step_seconds"] for turn in turns)


def _best_single(turns: Sequence[dict[str, Figures]]) -> str | None:
    """The single strategy with the fastest step; None: all were killed."""
    found = {strategy: ratio for strategy in SINGLE if (ratio := _to_plain(strategy, turns)) is not None}
    return min(found, key=found.__getitem__, default=None)


def _add_figures_of_turns(
    strategy: str, figures: Figures, turns: Sequence[dict[str, Figures]], limit_bytes: int
) -> None:
    to_plain = _to_plain(strategy, turns)
    figures["trains"] = float(to_plain is not None)
    if to_plain is not None:
        figures["fourth_loss"] = turns[-1][strategy]["fourth_loss"]
        figures["peak_bytes"] = max(figures["peak_bytes"], *(turn[strategy]["peak_bytes"] for turn in turns))
        figures["peak_to_limit"] = figures["peak_bytes"] / limit_bytes
        figures["step_to_plain"] = to_plain


def _compare(plan: Figures, turns: Sequence[dict[str, Figures]], best: str | None) -> None:
    """Add what was predicted, and the best single strategy, to the figures of the plan."""
    plan["trains"] = float(bool(plan["trains"]) and all(turn[PLAN] for turn in turns))
    if plan["trains"]:
        plan["peak_off_predicted"] = abs(plan["peak_bytes"] / plan["predicted_bytes"] - 1)
        plan["step_off_predicted"] = abs(plan["step_seconds"] / plan["predicted_seconds"] - 1)
        if best is not None and all(turn[best] for turn in turns):
            ratio = median_of([turn[PLAN]["step_seconds"] / turn[best]["step_seconds"] for turn in turns])
            plan |= {"step_to_best": ratio.median, "step_to_best_low": ratio.low, "step_to_best_high": ratio.high}
            cpu_ratios = [_cpu_seconds(turn[PLAN]) / _cpu_seconds(turn[best]) for turn in turns]
            plan["cpu_to_best"] = statistics.median(cpu_ratios)


def _cpu_seconds(step: Figures) -> float:
    return step["user_seconds"] + step["system_seconds"]


def plain_peak(model: str, scratch: Path) -> int:
    """The most memory in three plain steps."""
    with training_within(model, PLAIN, None, 0, scratch) as training:
        return int(max(training.step()["peak_bytes"] for _ in range(3)))


def _with_least_budget(model: str, limit_bytes: int, scratch: Path) -> Figures:
    """Whether compiled training stays alive at all: it takes minutes, so it is tried alone."""
    with training_within(model, "budget", limit_bytes, 0.0, scratch) as training:
        return training.figures([training.step(), training.step()])


@contextmanager
def training_within(
    model: str, strategy: str, limit_bytes: int | None, budget: float, scratch: Path
) -> Iterator[Training]:
    """One of `MODELS` in a process of its own, with a strategy, in a memory cgroup with that limit, if there is one."""
    request = json.dumps([model, strategy, limit_bytes, budget, str(scratch)])
    with memory_cgroup() as cgroup:
        if limit_bytes is not None:
            cgroup.limit(limit_bytes)
        command = cgroup.command([sys.executable, "-m", "bench.memory_plan", "--train", request])
        with (
            suppress(BrokenPipeError),  # it was killed before it read its last line
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        ):
            yield Training(strategy, process, cgroup)


# --- in the cgroup ----------------------------------------------------------------------------------------------------

Loss = Callable[[], torch.Tensor]


def train(name: str, strategy: str, limit_bytes: int | None, budget: float, scratch: str) -> None:
    """One step for each line of standard input, a line of figures for each step."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses: list[float] = []
    with ExitStack() as stack:
        loss_of, figures_of = _prepared(strategy, model, batch, limit_bytes, budget, scratch, stack)
        torch.manual_seed(1)
        for _ in sys.stdin:
            Path("/proc/self/clear_refs").write_text("5")
            used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
            figures = {"step_seconds": seconds, "peak_bytes": _peak_bytes(), "last_loss": loss.item()}
            figures["user_seconds"] = now.ru_utime - used.ru_utime
            figures["system_seconds"] = now.ru_stime - used.ru_stime
            figures["num_page_faults"] = now.ru_minflt - used.ru_minflt
            losses.append(loss.item())
            figures["fourth_loss"] = losses[min(3, len(losses) - 1)]
            del loss
            gc.collect()
            print(json.dumps(figures | figures_of()), flush=True)


def _prepared(
    strategy: str,
    model: nn.Module,
    batch: tuple[Any, ...],
    limit_bytes: int | None,
    budget: float,
    scratch: str,
    stack: ExitStack,
) -> tuple[Loss, Callable[[], Figures]]:
    """What computes the loss, and what else is told of a step."""
    import tierstore

    loss_of: Loss = lambda: model(*batch)  # noqa: E731 - what follows wraps it
    if strategy in ("checkpoint", "every other"):
        for block in blocks_of_model(model)[:: 1 if strategy == "checkpoint" else 2]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    elif strategy in ("budget", COMPILED):
        if strategy == "budget":
            torch._functorch.config.activation_memory_budget = budget
        compiled = torch.compile(model, backend="aot_eager_decomp_partition")
        return lambda: compiled(*batch), dict
    elif strategy == "offload":
        store = stack.enter_context(tierstore.TierStore(scratch))
        return tierstore.tiered_offload(store)(loss_of), dict
    elif strategy == PLAN:
        store = stack.enter_context(tierstore.TierStore(scratch))
        began = time.perf_counter()
        plan = tierstore.plan_memory(model, loss_of, store=store, limit=limit_bytes)
        planning_seconds = time.perf_counter() - began
        print(plan, file=sys.stderr)
        plan.apply(model)

        def told() -> Figures:
            now = store.stats().memory_plan
            return {
                "predicted_bytes": now["predicted_peak_bytes"],
                "predicted_seconds": now["predicted_step_seconds"],
                "corrections": now["num_corrections"],
                "planning_seconds": planning_seconds,
                "decision_seconds": plan.decision_seconds,
            }

        return loss_of, told
    return loss_of, dict


def _peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        train(*json.loads(sys.argv[2]))
    else:
        main_of_one_variant(measure)

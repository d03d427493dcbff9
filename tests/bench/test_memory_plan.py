"""What the benchmark of memory plans makes of steps, and of processes that end."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch
from torch import nn

from bench import memory_plan, plan_trainings
from bench.cgroup import CgroupError, memory_cgroup
from bench.memory_plan import Compared, Turn
from bench.trainings import Training

Around = Callable[..., AbstractContextManager[Training]]
MIB = 2**20

LIVES = "print(json.dumps(STEP), flush=True)"
KILLED = f"b'x' * {256 * MIB}"


def step(seconds: float, *, peak_bytes: int = 90, predicted: tuple[float, int] = (1.0, 100)) -> dict[str, float]:
    return {
        "step_seconds": seconds,
        "peak_bytes": peak_bytes,
        "predicted_seconds": predicted[0],
        "predicted_bytes": predicted[1],
        "user_seconds": seconds,
        "system_seconds": seconds,
    }


@contextmanager
def toy(each_step: str) -> Iterator[Training]:
    """A process that does so whenever it is told to, within 64 MiB."""
    program = f"import sys, json\nSTEP = {step(1.0)}\nfor _ in sys.stdin:\n  {each_step}"
    try:
        with memory_cgroup() as cgroup:
            cgroup.limit(64 * MIB)
            with Popen(cgroup.command([sys.executable, "-c", program]), stdin=PIPE, stdout=PIPE, text=True) as process:
                yield Training("toy", process, cgroup)
    except CgroupError as error:
        pytest.skip(str(error))


def within(steps: dict[str, str], started: list[str]) -> Around:
    """In the place of `training_within`: toys by strategy, noted when they start."""

    def training_within(model: str, strategy: str, limit_bytes: int | None, scratch: Path) -> object:
        started.append(strategy)
        return toy(steps[strategy])

    return training_within


def test_a_case_is_the_median_of_its_pairs_not_of_its_turns() -> None:
    pairs: list[list[Turn]] = [
        [{"offload": step(1.0), "plan": step(seconds)} for seconds in of_pair]
        for of_pair in ((0.8, 0.8, 0.8), (1.0, 1.0), (1.1, 1.1, 0.1, 0.1, 5.0))
    ]
    plan = {"trains": 1.0, "peak_bytes": 80.0}
    memory_plan._add_figures_of_pairs(plan, Compared("offload", pairs), 95)
    assert [plan[f"step_to_best_in_pair_{pair}"] for pair in (1, 2, 3)] == [0.8, 1.0, 1.1]
    assert plan["step_to_best"] == 1.0
    assert plan["peak_to_limit"] == pytest.approx(90 / 95)


def test_a_plan_is_off_by_the_median_step_and_by_the_highest_peak() -> None:
    of_pair = [(1.0, 90), (1.2, 104), (1.3, 95)]
    pair: list[Turn] = [{"plan": step(seconds, peak_bytes=peak_bytes)} for seconds, peak_bytes in of_pair]
    plan = {"trains": 1.0, "peak_bytes": 80.0}
    memory_plan._add_figures_of_pairs(plan, Compared(None, [pair]), 100)
    assert plan["step_off_predicted"] == pytest.approx(0.2)
    assert plan["peak_off_predicted"] == pytest.approx(0.04)
    assert "step_to_best" not in plan
    plan = {"trains": 1.0}
    memory_plan._add_figures_of_pairs(plan, Compared("offload", [[{"offload": step(1.0), "plan": {}}]]), 100)
    assert plan == {"trains": 0.0}, "it was killed"


def test_single_strategies_by_their_steps_without_those_that_were_killed() -> None:
    turn: Turn = {
        "plain": step(1.0),
        "plain, compiled": step(0.5),
        "checkpoint": step(1.4),
        "every other": {},
        "offload": step(1.2),
        "budget": step(0.65),
    }
    assert memory_plan._fastest_first([turn, turn]) == ["offload", "budget", "checkpoint"]


ALL_LIVE = {"checkpoint": LIVES, "offload": LIVES, "plan": LIVES, "plan from a file": LIVES}


@pytest.mark.parametrize(
    ("killed", "best", "num_pairs", "started"),
    [
        (None, "offload", 3, ["offload", "plan from a file"] * 2),
        ("offload", "checkpoint", 3, ["checkpoint", "plan from a file"] * 2),
        ("plan", "offload", 1, []),
        ("plan from a file", "offload", 2, ["offload", "plan from a file"]),
    ],
)
def test_pairs_until_one_is_killed(
    killed: str | None,
    best: str,
    num_pairs: int,
    started: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    steps = ALL_LIVE | ({} if killed is None else {killed: KILLED})
    seen: list[str] = []
    monkeypatch.setattr(memory_plan, "training_within", within(steps, seen))
    turn: Turn = {"plain": step(1.0), "offload": step(1.2), "checkpoint": step(1.4)}
    with ExitStack() as stack:
        trainings = {name: stack.enter_context(toy(steps[name])) for name in ("offload", "checkpoint", "plan")}
        compared = memory_plan._compared("a model", 100, trainings, [turn], tmp_path)
    assert (compared.best, len(compared.pairs), seen) == (best, num_pairs, started)


def test_without_a_single_strategy_the_plan_goes_on_alone(tmp_path: Path) -> None:
    with toy(LIVES) as plan:
        compared = memory_plan._compared("a model", 100, {"plan": plan}, [{"plain": step(1.0)}], tmp_path)
    assert compared.best is None
    assert [list(turn) for turn in compared.turns] == [["plan"]] * memory_plan.TURNS_OF_PAIR


class Summed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


def test_a_plan_is_loaded_where_another_process_has_saved_it(tmp_path: Path) -> None:
    batch = (torch.randn(8, 64),)
    for strategy in (plan_trainings.PLAN, plan_trainings.LOADED_PLAN):
        with ExitStack() as stack:
            model = Summed(*(nn.Linear(64, 64) for _ in range(4)))
            loss_of, told = plan_trainings._prepared(strategy, model, batch, 2**40, tmp_path, stack)
            loss_of().backward()
            assert told()["predicted_bytes"] > 0
            assert ("planning_seconds" in told()) == (strategy == plan_trainings.PLAN)

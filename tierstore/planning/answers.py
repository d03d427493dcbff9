"""One answer for one workload, machine, number of ranks and fleet. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..simulator import Settings, Workload
from .costs import Costs, Use, costs_of
from .machines import Machine
from .prediction import Misfit, Prediction, predict

__all__ = ["Answer", "answer"]


@dataclass(frozen=True)
class Answer:
    """The question and its answer.

    Attributes:
        machine: name of the machine.
        num_ranks: ranks on each host.
        num_hosts: hosts in the fleet.
        outcome: the prediction of a step, or which tier is too small.
        costs: None if the workload does not fit.
    """

    machine: str
    num_ranks: int
    num_hosts: int
    outcome: Prediction | Misfit
    costs: Costs | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Either `prediction` and `costs` or `misfit` are set; the others are None."""
        outcome = self.outcome
        return {
            "machine": self.machine,
            "num_ranks": self.num_ranks,
            "num_hosts": self.num_hosts,
            "prediction": None if isinstance(outcome, Misfit) else asdict(outcome) | {"slowdown": outcome.slowdown},
            "misfit": asdict(outcome) if isinstance(outcome, Misfit) else None,
            "costs": None if self.costs is None else asdict(self.costs),
        }


def answer(workload: Workload, machine: Machine, settings: Settings, *, num_ranks: int = 1, use: Use) -> Answer:
    """Predict a step of the workload and its costs. Arguments and errors as those of `predict` and `costs_of`."""
    outcome = predict(workload, machine, settings, num_ranks=num_ranks)
    costs = costs_of(outcome, machine.hardware, use) if isinstance(outcome, Prediction) else None
    return Answer(machine.name, num_ranks, use.num_hosts, outcome, costs)
